// A token: what signs acts. Its secret is in the memory of this tab alone, as a key that no script can read again.

import { ApiError, postSigned } from "/api.js";

const SCHEME = "mccs-act-1";
const NONCE_BYTES = 16;
// Refusals after which the token is of no more use; tokens end with the service.
const OVER = ["expired", "removed", "spent", "wrong_token"];
// Refusals of acts that were not counted.
const UNCOUNTED = [...OVER, "too_many_wrong", "replayed", "no_right", "bad_act", "console_away"];

const hex = (bytes) => [...new Uint8Array(bytes)].map((byte) => byte.toString(16).padStart(2, "0")).join("");

// Why this page cannot sign, if it cannot: browsers give their functions for it to secure pages alone.
export function cannotSign() {
  if (isSecureContext && globalThis.crypto?.subtle) return null;
  return `This browser lets no page of ${location.origin} sign: it must come over https, or from this computer. ` +
    `Open it as http://127.0.0.1:${location.port || 80}/ through ssh -L, or through a proxy with TLS. Or act with mccsctl on the host.`;
}

export class Token {
  constructor(id, key) {
    Object.assign(this, { id, key, view: null, seenAt: 0, over: null });
  }

  // The token of a text, once the service has told what it may.
  static async of(text) {
    const found = /^([0-9a-f]{16})\.([0-9a-f]{64})$/.exec(text.trim());
    if (!found) throw new ApiError(0, { code: "no_token", message: "This is no token: one has 16 digits, a dot and 64 digits, as mccsctl token add prints it." });
    const key = await crypto.subtle.importKey("raw", new TextEncoder().encode(found[2]), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
    const token = new Token(found[1], key);
    const [view] = (await token.send({ act: "token" })).tokens;
    Object.assign(token, { view, seenAt: performance.now() });
    return token;
  }

  may(right) {
    return this.view.rights.includes(right);
  }

  get secondsLeft() {
    return Math.max(0, this.view.seconds_left - (performance.now() - this.seenAt) / 1000);
  }

  // Does an act: what the service answers.
  async act(act) {
    let refusal = null;
    try {
      return await this.send(act);
    } catch (error) {
      refusal = error.code;
      if (OVER.includes(refusal)) this.over = error.message;
      throw error;
    } finally {
      if (!UNCOUNTED.includes(refusal)) this.view.acts_left = Math.max(0, this.view.acts_left - 1);
    }
  }

  async send(act) {
    const body = JSON.stringify(act);
    const nonce = hex(crypto.getRandomValues(new Uint8Array(NONCE_BYTES)));
    const text = new TextEncoder().encode([SCHEME, this.id, nonce, body].join("\n"));
    const mac = hex(await crypto.subtle.sign("HMAC", this.key, text));
    return (await postSigned("acts", body, `mccs id="${this.id}", nonce="${nonce}", mac="${mac}"`)).answer;
  }
}
