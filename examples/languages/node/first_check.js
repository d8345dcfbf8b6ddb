/**
 * The first check in Node: reads the address of a caller from each line, and prints what a web application would
 * answer.
 *
 *     yes 192.0.2.7 | head -7 | node first_check.js [HOST:PORT [DEADLINE_MS]]
 */

import { createInterface } from "node:readline";
import { DEFAULT_DEADLINE_MS, Limiter } from "./limiter.js";

/** The status that an application sends its own caller. */
function answer(decision) {
  if (decision.failOpen) {
    return `200 OK (nobody could be asked: ${`${decision.reason} ${decision.error}`.trim()})`;
  }
  if (decision.allowed) {
    return `200 OK (${decision.remaining} left)`;
  }
  if (decision.reason === "INVALID_REQUEST") {
    return "400 Bad Request";
  }
  return `429 Too Many Requests (Retry-After: ${decision.retryAfterSeconds})`;
}

const [target = "127.0.0.1:9090", deadlineMs = DEFAULT_DEADLINE_MS] = process.argv.slice(2);
const limiter = new Limiter(target, Number(deadlineMs));
await limiter.waitUntilReady();
for await (const address of createInterface({ input: process.stdin })) {
  console.log(answer(await limiter.check(address, "ip", "/login")));
}
limiter.close();
