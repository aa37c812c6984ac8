// The API: documents that are asked for again and again while somebody looks, each with its tag.

export class ApiError extends Error {
  constructor(status, { code, message, since }) {
    super(message);
    Object.assign(this, { status, code, since });
  }
}

async function failure(response) {
  const told = await response.json().catch(() => null);
  const error = told?.error ?? { code: "http", message: `the console answered ${response.status}` };
  return new ApiError(response.status, error);
}

async function fetchFrom(path, options) {
  try {
    return await fetch(`/api/v1/${path}`, { cache: "no-store", ...options });
  } catch {
    throw new ApiError(0, { code: "console_away", message: "the console does not answer" });
  }
}

// A document, once.
export async function get(path) {
  const response = await fetchFrom(path);
  if (!response.ok) throw await failure(response);
  return response.json();
}

// What a text is answered with; as a blob where it is to be saved.
export async function post(path, body, asBlob = false) {
  const headers = body == null ? {} : { "Content-Type": "text/plain" };
  const response = await fetchFrom(path, { method: "POST", body, headers });
  if (!response.ok) throw await failure(response);
  return asBlob ? response.blob() : response.json();
}

// An act that was signed.
export async function postSigned(path, body, authorization) {
  const headers = { "Content-Type": "application/json", Authorization: authorization };
  const response = await fetchFrom(path, { method: "POST", body, headers });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// How long a look may take: that of all hosts takes some seconds.
const LOOK_WITHIN_MS = 30000;

// A document that `seen` gets whenever it has changed, and `failed` the reason there is none.
export class Watched {
  constructor(path, everyMs, seen, failed) {
    Object.assign(this, { path, everyMs, seen, failed, tag: null, timer: null, isOn: false, turn: 0 });
    this.onSight = () => !document.hidden && this.now();
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    document.addEventListener("visibilitychange", this.onSight);
    this.now();
  }

  stop() {
    this.isOn = false;
    this.turn += 1;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onSight);
  }

  now() {
    this.turn += 1;
    this.lookIn(0);
  }

  lookIn(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), ms);
  }

  async look() {
    const [began, turn] = [performance.now(), this.turn];
    let every = this.everyMs;
    let [found, error, tag] = [null, null, this.tag];
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const response = await fetchFrom(this.path, { headers, signal: AbortSignal.timeout(LOOK_WITHIN_MS) });
      if (response.status === 200) {
        tag = response.headers.get("ETag");
        found = await response.json();
      } else if (response.status !== 304) {
        throw await failure(response);
      }
    } catch (thrown) {
      error = thrown instanceof ApiError ? thrown : new ApiError(0, { code: "console_away", message: "the console's answer broke off" });
      tag = null;
      // What is refused is refused again: it need not be asked as often.
      if (error.status === 404 || error.status === 409) every = Math.max(every, 30000);
    }
    // Another look has begun meanwhile, or nobody wants one any more.
    if (turn !== this.turn) return;
    this.tag = tag;
    // Whom nobody sees asks nothing; who is slow has a rest.
    const rest = Math.max(100, every - (performance.now() - began));
    if (this.isOn && !document.hidden) this.lookIn(rest);
    // Last: a mistake in what shows it is no failure of the service's.
    if (error) this.failed(error);
    else this.seen(found);
  }
}
