// Work that belongs to the next picture: however often it is asked for, it is done once.

/** A function that runs `work` before the next picture. In a hidden tab a timer stands in. */
export function perFrame(work) {
  let asked = false;
  const run = () => {
    asked = false;
    work();
  };
  return () => {
    if (asked) return;
    asked = true;
    if (document.hidden) setTimeout(run, 200);
    else requestAnimationFrame(run);
  };
}
