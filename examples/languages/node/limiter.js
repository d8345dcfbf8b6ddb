/** Asks a ratelimitd node whether a request may proceed, and answers itself when the node does not. */

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const PROTO = fileURLToPath(new URL("../../../proto/ratelimiter/v1/ratelimiter.proto", import.meta.url));
const { RateLimiter } = grpc.loadPackageDefinition(
  loadSync(PROTO, { defaults: true, enums: String, longs: Number }),
).ratelimiter.v1;

/** How long a check may take before the request is let through. */
export const DEFAULT_DEADLINE_MS = 20;

const READY_DEADLINE_MS = 1_000;

/** Of the contract. What is longer never becomes an error of the transport, which would let the request through. */
const MAX_IDENTIFIER_BYTES = 256;

const OPTIONS = {
  // Behind a name that has several addresses, all of them are asked in turn.
  "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
  // A dead connection is found although nobody asks, and one that nobody uses is kept.
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 5_000,
  "grpc.keepalive_permit_without_calls": 1,
  "grpc.client_idle_timeout_ms": 2 ** 31 - 1,
  // A node that comes back is found within a second; the default waits up to two minutes.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 500,
  // A node is an internal address, which the proxy for the way out must not see.
  "grpc.enable_http_proxy": 0,
};

const UNCHECKED = new Set(["NO_ANSWER", "FAIL_OPEN_BREAKER", "FAIL_OPEN_ERROR"]);

/**
 * The answer to a check.
 *
 * @typedef {object} Decision
 * @property {boolean} allowed
 * @property {boolean} failOpen let through unchecked, by this limiter or by the node
 * @property {number} remaining
 * @property {number} retryAfterSeconds with a denial
 * @property {string} reason a reason of the contract, or NO_ANSWER: the node gave none that could be used
 * @property {string} error with NO_ANSWER: the name of the gRPC status
 */

/** The connections to the nodes. One serves the whole process. */
export class Limiter {
  #checks;
  #deadlineMs;

  /**
   * Connects with its first check, or in waitUntilReady.
   *
   * @param {string} target host:port
   */
  constructor(target, deadlineMs = DEFAULT_DEADLINE_MS) {
    this.#checks = new RateLimiter(target, grpc.credentials.createInsecure(), OPTIONS);
    this.#deadlineMs = deadlineMs;
  }

  /**
   * Connects, for a second at most, by a check that charges nothing. Await it at start: connecting takes longer than
   * a check may, so that the first ones would be let through.
   */
  async waitUntilReady() {
    const request = { identifier: "ready", identifierType: "user", endpoint: "/", peek: true };
    await this.#ask(request, { deadline: Date.now() + READY_DEADLINE_MS, waitForReady: true });
  }

  /**
   * Asks for one token. It is answered within the deadline, whatever becomes of the node, and rejects only after close.
   *
   * @param {string} endpoint the template of a route and never the path, which would get a bucket of its own
   * @returns {Promise<Decision>}
   */
  async check(identifier, identifierType, endpoint) {
    if (typeof identifier !== "string" || identifier === "" || Buffer.byteLength(identifier) > MAX_IDENTIFIER_BYTES) {
      return denied("INVALID_REQUEST");
    }
    return this.#ask({ identifier, identifierType, endpoint }, { deadline: Date.now() + this.#deadlineMs });
  }

  /** Ends the connections. */
  close() {
    this.#checks.close();
  }

  #ask(request, options) {
    return new Promise((resolve) => {
      this.#checks.checkRateLimit(request, options, (error, answer) => {
        resolve(error ? withoutAnswer(error.code) : decision(answer));
      });
    });
  }
}

function decision({ allowed, remainingTokens, retryAfterSeconds, reason }) {
  // A node that is set to deny answers FAIL_OPEN_BREAKER, too.
  const failOpen = allowed && UNCHECKED.has(reason);
  return { allowed, failOpen, remaining: remainingTokens, retryAfterSeconds, reason, error: "" };
}

/** Lets the request through, unless it is the check that was wrong: bad input opens nothing. */
function withoutAnswer(code) {
  if (code === grpc.status.INVALID_ARGUMENT) {
    return denied("INVALID_REQUEST");
  }
  const error = grpc.status[code];
  return { allowed: true, failOpen: true, remaining: 0, retryAfterSeconds: 0, reason: "NO_ANSWER", error };
}

function denied(reason) {
  return { allowed: false, failOpen: false, remaining: 0, retryAfterSeconds: 0, reason, error: "" };
}
