package com.example.app;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/**
 * The first check in Java: reads the address of a caller from each line, and prints what a web application would
 * answer.
 *
 * <pre>yes 192.0.2.7 | head -7 | java -jar target/first-check.jar [HOST:PORT [DEADLINE_MS]]</pre>
 */
public final class FirstCheck {
  private FirstCheck() {}

  public static void main(String[] arguments) throws IOException {
    String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:9090";
    Duration deadline =
        arguments.length > 1 ? Duration.ofMillis(Long.parseLong(arguments[1])) : Limiter.DEFAULT_DEADLINE;
    try (Limiter limiter = new Limiter(target, deadline)) {
      limiter.waitUntilReady();
      BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
      for (String address = lines.readLine(); address != null; address = lines.readLine()) {
        System.out.println(answer(limiter.check(address, "ip", "/login")));
      }
    }
  }

  /** The status that an application sends its own caller. */
  static String answer(Decision decision) {
    if (decision.failOpen()) {
      return "200 OK (nobody could be asked: " + (decision.reason() + " " + decision.error()).strip() + ")";
    }
    if (decision.allowed()) {
      return "200 OK (" + decision.remaining() + " left)";
    }
    if (decision.reason().equals("INVALID_REQUEST")) {
      return "400 Bad Request";
    }
    return "429 Too Many Requests (Retry-After: " + decision.retryAfterSeconds() + ")";
  }
}
