// The field for the key, when the server asks for one.
import { again } from "./live.js";
import { look } from "./records.js";
import { keepKey, locked } from "./server.js";

export function startLogin(onOpen) {
  const dialog = document.getElementById("login");
  const input = document.getElementById("login-key");
  const problem = document.getElementById("login-problem");
  document.getElementById("login-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    keepKey(input.value.trim());
    input.value = "";
    locked.set(false);
    await onOpen();
    if (locked.value) {
      problem.textContent = "The server does not know this key.";
      return;
    }
    problem.textContent = "";
    dialog.close();
    again();
    look();
  });
  const show = () => locked.value && !dialog.open && dialog.showModal();
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
  dialog.addEventListener("close", show); // browsers let a second Escape through
  locked.watch(show);
}
