package com.example.app;

import java.util.Set;

/**
 * The answer to a check.
 *
 * @param retryAfterSeconds with a denial
 * @param reason a reason of the contract, or {@code NO_ANSWER}: the node gave none that could be used
 * @param error with {@code NO_ANSWER}: the name of the gRPC status
 */
public record Decision(boolean allowed, int remaining, int retryAfterSeconds, String reason, String error) {
  static final Decision INVALID_REQUEST = new Decision(false, 0, 0, "INVALID_REQUEST", "");

  private static final Set<String> UNCHECKED = Set.of("NO_ANSWER", "FAIL_OPEN_BREAKER", "FAIL_OPEN_ERROR");

  static Decision withoutAnswer(String error) {
    return new Decision(true, 0, 0, "NO_ANSWER", error);
  }

  /** Whether the request was let through unchecked, by the limiter or by the node. */
  public boolean failOpen() {
    // A node that is set to deny answers FAIL_OPEN_BREAKER, too.
    return allowed && UNCHECKED.contains(reason);
  }
}
