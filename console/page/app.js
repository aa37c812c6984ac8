// The page: asks, keeps what it knows, and shows the view that its address names.

import { actView } from "/act_view.js";
import { get, Watched } from "/api.js";
import { Detail } from "/communicator.js";
import { h, say } from "/dom.js";
import { Model } from "/model.js";
import { policyView } from "/policy.js";
import { standing, troubles } from "/troubles.js";
import { age, clock, plural } from "/units.js";
import { communicatorsView, hostsView, linksView, nowView, tenantsView } from "/views.js";

const VIEWS = [
  ["now", "Now", nowView],
  ["communicators", "Communicators", communicatorsView],
  ["tenants", "Tenants", tenantsView],
  ["hosts", "Hosts", hostsView],
  ["links", "Links", linksView],
  ["policy", "Policy", policyView],
  ["act", "Act", actView],
];
// Communicators that are asked why they wait, without anybody's asking.
const ASKED_MAX = 3;

const byId = (id) => document.getElementById(id);
const [main, live, away, state] = ["main", "live", "away", "state"].map(byId);

const app = { model: new Model(), reports: new Map(), noPolicy: null, token: null, prefilled: null, tokenChanged, forget };
const detail = new Detail(byId("detail"), app);
const tabs = VIEWS.map(([name, title]) => {
  const number = h("span", { class: "count", hidden: true });
  const link = h("a", { href: `#/${name}` }, `${title} `, number);
  byId("tabs").append(h("li", {}, link));
  return { name, link, number };
});
const made = new Map();
let [view, shownName, known] = [null, null, new Set()];

function show() {
  const [name, which] = location.hash.replace(/^#\//, "").split("/");
  const found = VIEWS.find(([own]) => own === name) ?? VIEWS[0];
  if (shownName !== found[0]) {
    shownName = found[0];
    if (!made.has(shownName)) made.set(shownName, found[2](app));
    view = made.get(shownName);
    main.replaceChildren(...view.elements);
    view.shown?.();
    tabs.forEach((tab) => (tab.name === shownName ? tab.link.setAttribute("aria-current", "page") : tab.link.removeAttribute("aria-current")));
    document.title = `mccs: ${found[1]}`;
  }
  if (which) detail.open(decoded(which));
  else detail.close();
  view.focused?.();
  update();
}

function update() {
  const { model } = app;
  if (!model.now) return;
  const all = troubles(model, app.reports);
  view.update(model, all);
  detail.update();
  const bad = all.filter((one) => one.isBad).length;
  const numbers = { now: all.length, communicators: model.communicators.length, tenants: model.now.tenants.length, hosts: Math.max(1, model.now.hosts.length) };
  for (const { name, number } of tabs) {
    number.hidden = !numbers[name];
    say(number, String(numbers[name] ?? ""));
    number.classList.toggle("bad", name === "now" && bad > 0);
  }
  // Only what is new is said.
  const keys = new Set(all.map((one) => one.key));
  const fresh = all.filter((one) => one.isBad && !known.has(one.key));
  if (fresh.length) say(live, `${plural(fresh.length, "new problem")}: ${fresh.slice(0, 3).map((one) => `${one.what}, ${one.text}`).join("; ")}`);
  known = keys;
}

// Something was done with the token, or time has passed.
function tokenChanged() {
  const { token } = app;
  if (token?.over) forget(`The token is of no more use: ${token.over}`);
  else if (token?.secondsLeft === 0) forget("The token has expired.");
  made.get("act")?.update();
  update();
}

function forget(why) {
  if (!app.token) return;
  app.token = null;
  app.tokenTold(why);
  tokenChanged();
}

// A part of the address, which anybody may have written.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function askWhyTheyWait() {
  // What is known is old then.
  if (document.hidden || !away.hidden) return;
  const still = standing(app.model).slice(0, ASKED_MAX);
  for (const number of app.reports.keys()) if (!still.some(({ number: own }) => own === number)) app.reports.delete(number);
  await Promise.allSettled(still.map(async ({ number }) => {
    const { stuck } = await get(`communicators/${number}/why-stuck`);
    app.reports.set(number, stuck);
  }));
}

function seen(overview) {
  if (!away.hidden) say(live, "The service answers again.");
  away.hidden = true;
  if (!overview) return;
  app.model.look(overview);
  say(byId("host"), `on ${overview.host}`);
  say(state, `${overview.version}, up ${age(overview.at_ns / 1e9)}`);
  state.classList.remove("bad");
  tokenChanged();
}

function gone(error) {
  app.model.before = null;
  app.model.still.clear();
  const since = error.since ? `since ${clock(error.since)}` : "";
  const others = { console_away: "The console does not answer", refused: "The service refuses to answer" };
  const what = others[error.code] ?? `The service is away ${since}`;
  say(away, `${what}: ${error.message}. This page asks on; what it shows is old.`);
  away.hidden = false;
  say(state, "away");
  state.classList.add("bad");
}

function seenCluster(document) {
  if (document) app.model.lookAtCluster(document.cluster, performance.now());
  stuck.start();
}

function noCluster(error) {
  if (error.status !== 404) return;
  stuck.stop();
  Object.assign(app.model, { cluster: null, stuck: null });
}

const watched = [
  new Watched("overview", 950, seen, gone),
  new Watched("failed", 5000, (document) => { if (document) app.model.failed = document.failed; }, () => {}),
  new Watched("cluster", 5000, seenCluster, noCluster),
  new Watched("policy", 3000, (document) => { if (document) app.model.policy = document.controller.show; }, (error) => {
    app.model.policy = null;
    app.noPolicy = error.message;
    update();
  }),
];
// Without a controller each communicator would be asked in turn; those that stand still are asked anyway.
const stuck = new Watched("stuck", 15000, (document) => { if (document) app.model.stuck = document.stuck; }, () => { app.model.stuck = null; });

addEventListener("hashchange", show);
// A page that a browser keeps to go back to keeps no token.
addEventListener("pagehide", () => forget("The token was forgotten when this page was left."));
show();
watched.forEach((one) => one.start());
setInterval(askWhyTheyWait, 4000);
