// The view that acts: takes a token, and has a form for each act that it may do.

import { ACTS, madeOf } from "/acts.js";
import { confirmed } from "/confirm.js";
import { h, say } from "/dom.js";
import { Token, cannotSign } from "/token.js";
import { age, plural } from "/units.js";

const RIGHTS = [["host", "This host"], ["policy", "Policy and links"], ["tenants", "Tenants of this host"], ["communicators", "Communicators"]];

// Has a button rest while something is done, and gives back the focus that a button at rest loses.
export async function resting(button, work) {
  button.disabled = true;
  await work();
  button.disabled = false;
  if (document.activeElement === document.body) button.focus();
}

// Does an act once somebody has read what it will do; `told` says how it goes.
export async function perform(app, kind, values, told) {
  const { model } = app;
  try {
    const act = madeOf(kind, values);
    say(told, "");
    const asked = kind.ask ? await kind.ask(act) : null;
    const lines = [...kind.will(act, model, asked), `The history says that ${app.token.view.name} did it.`];
    if (!await confirmed({ title: `${kind.title}?`, lines, changes: asked?.lines, button: kind.button })) {
      say(told, "Nothing was done.");
      return;
    }
    // It may have ended while the question stood.
    if (!app.token) throw new Error("The token is not there any more: nothing was done.");
    say(told, "The service does it…");
    say(told, kind.done(await app.token.act(act)));
  } catch (error) {
    say(told, error.code === undefined ? error.message : `Not done: ${error.message}`);
  }
  told.classList.toggle("bad-text", told.textContent.startsWith("Not done"));
  app.tokenChanged();
}

function input({ name, kind, choices, isOptional }, id) {
  const common = { id, name, required: !isOptional, autocomplete: "off", spellcheck: "false" };
  if (kind === "choice") return h("select", { id, name }, choices.map((choice) => h("option", { value: choice }, choice)));
  if (kind === "long") return h("textarea", common);
  return h("input", { ...common, type: "text", inputmode: kind === "number" ? "numeric" : null });
}

function form(app, kind) {
  const told = h("p", { role: "status" });
  const button = h("button", { type: "submit", class: "acts" }, `${kind.button}…`);
  const rows = kind.fields.map((one) => {
    const id = `${kind.act}-${one.name}`;
    const label = one.isOptional ? `${one.label} (may be empty)` : one.label;
    return h("p", { class: "field" }, h("label", { for: id }, label), input(one, id));
  });
  const element = h("form", { class: "act", "aria-labelledby": `${kind.act}-title`, novalidate: true }, h("h3", { id: `${kind.act}-title` }, kind.title), rows, h("p", { class: "tools" }, button), told);
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    resting(button, () => perform(app, kind, Object.fromEntries(new FormData(element)), told));
  });
  return element;
}

export function actView(app) {
  const secret = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false" });
  const told = h("p", { role: "status", id: "token-told" });
  const enter = h("form", { class: "act", novalidate: true }, h("p", { class: "field" }, h("label", { for: "token" }, "Token, as mccsctl token add prints it"), secret),
    h("p", { class: "tools" }, h("button", { type: "submit" }, "Use it")));
  const forget = h("button", { type: "button", onclick: () => app.forget("The token is forgotten.") }, "Forget it");
  const about = h("p");
  const held = h("div", { class: "tools", hidden: true }, about, forget);
  const explained = h("p", { class: "empty" }, "This page looks. With a token it acts: on the service's host, mccsctl token add NAME --rights host,policy prints one. This tab alone keeps it, in memory, until it is closed or loaded anew. Each act is signed with it; the secret itself is sent nowhere.");
  const forms = RIGHTS.map(([right, title]) => {
    const [name, none] = [`right-${right}`, h("p", { class: "empty" }, `This token has no right to it: mccsctl token add --rights ${right}.`)];
    const own = h("div", { class: "forms" }, ACTS.filter((kind) => kind.right === right).map((kind) => form(app, kind)));
    return { right, own, none, element: h("section", { "aria-labelledby": name, hidden: true }, h("h2", { id: name }, title), none, own) };
  });

  async function use() {
    const text = secret.value;
    secret.value = "";
    say(told, "Asking the service…");
    try {
      app.token = await Token.of(text);
      say(told, `The token of ${app.token.view.name} is in use.`);
      app.tokenChanged();
      forget.focus();
    } catch (error) {
      say(told, error.message);
    }
    told.classList.toggle("bad-text", !app.token);
  }

  enter.addEventListener("submit", (event) => {
    event.preventDefault();
    use();
  });

  function update() {
    const { token } = app;
    const why = cannotSign();
    enter.hidden = Boolean(token || why);
    held.hidden = !token;
    if (why) say(told, why);
    if (token) say(about, `${token.view.name} may do ${plural(token.view.acts_left, "act")}, for ${age(token.secondsLeft)}.`);
    for (const { right, own, none, element } of forms) {
      element.hidden = !token;
      own.hidden = !token?.may(right);
      none.hidden = !own.hidden;
    }
  }

  // What is told of a token that has gone.
  app.tokenTold = (text) => say(told, text);
  return {
    elements: [h("section", { "aria-labelledby": "token-title" }, h("h2", { id: "token-title" }, "Token"), explained, enter, held, told), ...forms.map(({ element }) => element)],
    shown: update,
    // Some other view has filled a field in: what is next to it comes next.
    focused: () => {
      if (!app.prefilled) return;
      const field = document.getElementById(app.prefilled.id);
      field.value = app.prefilled.value;
      app.prefilled = null;
      (field.closest("form").querySelector("textarea") ?? field).focus();
    },
    update,
  };
}
