package com.example.app;

import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import ratelimiter.v1.RateLimiterGrpc;
import ratelimiter.v1.Ratelimiter.RateLimitRequest;
import ratelimiter.v1.Ratelimiter.RateLimitResponse;

/**
 * Asks a ratelimitd node whether a request may proceed, and answers itself when the node does not.
 *
 * <p>It has the connections to the nodes. One serves the whole process, and all its threads.
 */
public final class Limiter implements AutoCloseable {
  /** How long a check may take before the request is let through. */
  public static final Duration DEFAULT_DEADLINE = Duration.ofMillis(20);

  /** Most of it is for a busy machine, on which loading classes takes a second. */
  private static final Duration READY_DEADLINE = Duration.ofSeconds(5);

  private static final int READY_CALLS = 50;
  private static final int CONNECT_TIMEOUT_MS = 1_000;
  private static final long RECONNECT_NANOS = TimeUnit.MILLISECONDS.toNanos(250);

  /** Of the contract. What is longer never becomes an error of the transport, which would let the request through. */
  private static final int MAX_IDENTIFIER_BYTES = 256;

  private final ManagedChannel channel;
  private final RateLimiterGrpc.RateLimiterBlockingStub checks;
  private final Duration deadline;
  private final AtomicLong reconnectedAtNanos = new AtomicLong(System.nanoTime());

  /** Connects with its first check, or in {@link #waitUntilReady}. The target is {@code host:port}. */
  public Limiter(String target, Duration deadline) {
    this.deadline = deadline;
    channel =
        NettyChannelBuilder.forTarget(target)
            .usePlaintext()
            // Behind a name that has several addresses, all of them are asked in turn.
            .defaultLoadBalancingPolicy("round_robin")
            // A dead connection is found although nobody asks, and one that nobody uses is kept.
            .keepAliveTime(10, TimeUnit.SECONDS)
            .keepAliveTimeout(5, TimeUnit.SECONDS)
            .keepAliveWithoutCalls(true)
            .idleTimeout(Long.MAX_VALUE, TimeUnit.DAYS)
            .withOption(ChannelOption.CONNECT_TIMEOUT_MILLIS, CONNECT_TIMEOUT_MS)
            // A node is an internal address, which the proxy for the way out must not see.
            .proxyDetector(address -> null)
            .build();
    checks = RateLimiterGrpc.newBlockingStub(channel);
  }

  /**
   * Connects, for five seconds at most, by checks that charge nothing. Call it at start: connecting, and loading the
   * classes that this needs, takes longer than a check may, so that the first ones would be let through. The next few
   * are slow, too, as nothing is compiled yet.
   */
  public void waitUntilReady() {
    RateLimitRequest request =
        RateLimitRequest.newBuilder()
            .setIdentifier("ready")
            .setIdentifierType("user")
            .setEndpoint("/")
            .setPeek(true)
            .build();
    // One deadline for all of them.
    var patient = checks.withWaitForReady().withDeadlineAfter(READY_DEADLINE);
    try {
      for (int call = 0; call < READY_CALLS; call++) {
        patient.checkRateLimit(request);
      }
    } catch (StatusRuntimeException error) {
      // Checks are let through until there is a node.
    }
  }

  /**
   * Asks for one token. It returns within the deadline, whatever becomes of the node.
   *
   * @param endpoint the template of a route and never the path, which would get a bucket of its own
   */
  public Decision check(String identifier, String identifierType, String endpoint) {
    if (identifier.isEmpty() || identifier.getBytes(StandardCharsets.UTF_8).length > MAX_IDENTIFIER_BYTES) {
      return Decision.INVALID_REQUEST;
    }
    RateLimitRequest request =
        RateLimitRequest.newBuilder()
            .setIdentifier(identifier)
            .setIdentifierType(identifierType)
            .setEndpoint(endpoint)
            .build();
    try {
      RateLimitResponse answer = checks.withDeadlineAfter(deadline).checkRateLimit(request);
      return new Decision(
          answer.getAllowed(),
          answer.getRemainingTokens(),
          answer.getRetryAfterSeconds(),
          answer.getReason().name(),
          "");
    } catch (StatusRuntimeException error) {
      return withoutAnswer(error.getStatus().getCode());
    }
  }

  /** Ends the connections. */
  @Override
  public void close() {
    channel.shutdownNow();
  }

  /** Lets the request through, unless it is the check that was wrong: bad input opens nothing. */
  private Decision withoutAnswer(Status.Code code) {
    if (code == Status.Code.INVALID_ARGUMENT) {
      return Decision.INVALID_REQUEST;
    }
    reconnect();
    return Decision.withoutAnswer(code.name());
  }

  /**
   * Tries to connect now if the last time is a while ago. By itself, grpc-java waits up to two minutes between
   * attempts, which no option shortens; a node that comes back is to be found within a second.
   */
  private void reconnect() {
    long now = System.nanoTime();
    long last = reconnectedAtNanos.get();
    if (now - last >= RECONNECT_NANOS
        && channel.getState(false) == ConnectivityState.TRANSIENT_FAILURE
        && reconnectedAtNanos.compareAndSet(last, now)) {
      channel.resetConnectBackoff();
    }
  }
}
