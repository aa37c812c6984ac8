// A question before an act: it says what will happen. Escape and "Cancel" mean no.

import { h } from "/dom.js";

let number = 0;

// Asks; whether to go on.
export function confirmed({ title, lines, changes = [], button }) {
  number += 1;
  const [name, about] = [`question-${number}`, `question-${number}-about`];
  const answer = (value) => () => dialog.close(value);
  const dialog = h("dialog", { "aria-labelledby": name, "aria-describedby": about },
    h("h2", { id: name }, title),
    h("div", { id: about }, lines.map((line) => h("p", {}, line))),
    changes.length ? h("pre", { tabindex: 0, "aria-label": "What would change" }, changes.join("\n")) : null,
    // Whoever presses Enter without reading does nothing.
    h("p", { class: "tools" }, h("button", { type: "button", autofocus: true, onclick: answer("no") }, "Cancel"),
      h("button", { type: "button", class: "acts", onclick: answer("yes") }, button)));
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
