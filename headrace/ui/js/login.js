// The field for the key, when the server asks for one.
import { keepKey, locked } from "./server.js";

/**
 * tried: asks the server for something, with the key; it may say what is wrong with that key.
 * opened: called when it was let in.
 */
export function startLogin(tried, opened) {
  const dialog = document.getElementById("login");
  const input = document.getElementById("login-key");
  const problem = document.getElementById("login-problem");
  document.getElementById("login-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    keepKey(input.value.trim());
    input.value = "";
    locked.set(false);
    const wrong = await tried();
    if (locked.value || wrong) {
      problem.textContent = wrong || "The server does not know this key.";
      return;
    }
    problem.textContent = "";
    dialog.close();
    opened();
  });
  const show = () => locked.value && !dialog.open && dialog.showModal();
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
  dialog.addEventListener("close", show); // browsers let a second Escape through
  locked.watch(show);
}
