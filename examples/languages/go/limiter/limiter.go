// Package limiter asks a ratelimitd node whether a request may proceed, and answers itself when the node does not.
package limiter

import (
	"context"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "example.com/app/gen/ratelimiter/v1"
)

// DefaultDeadline is how long a check may take before the request is let through.
const DefaultDeadline = 20 * time.Millisecond

const (
	readyDeadline = time.Second
	// Of the contract. What is longer never becomes an error of the transport, which would let the request through.
	maxIdentifierBytes = 256
)

// Decision is the answer to a check.
type Decision struct {
	Allowed           bool
	Remaining         int32
	RetryAfterSeconds int32  // with a denial
	Reason            string // a reason of the contract, or NO_ANSWER: the node gave none that could be used
	Error             string // with NO_ANSWER: the name of the gRPC status
}

// FailOpen tells whether the request was let through unchecked, by this limiter or by the node.
func (d Decision) FailOpen() bool {
	switch d.Reason {
	case "NO_ANSWER", "FAIL_OPEN_BREAKER", "FAIL_OPEN_ERROR":
		return d.Allowed // a node that is set to deny answers FAIL_OPEN_BREAKER, too
	}
	return false
}

// Limiter has the connections to the nodes. One serves the whole process, and all its goroutines.
type Limiter struct {
	connection *grpc.ClientConn
	checks     pb.RateLimiterClient
	deadline   time.Duration
}

// New returns a limiter that connects with its first check, or in WaitUntilReady. The target is host:port; behind a
// name that has several addresses, all of them are asked in turn.
func New(target string, deadline time.Duration) (*Limiter, error) {
	connection, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
		// A dead connection is found although nobody asks, and one that nobody uses is kept.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithIdleTimeout(0),
		// A node that comes back is found within a second; the default waits up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond,
			},
			MinConnectTimeout: time.Second,
		}),
		// A node is an internal address, which the proxy for the way out must not see.
		grpc.WithNoProxy(),
	)
	if err != nil {
		return nil, err
	}
	return &Limiter{connection, pb.NewRateLimiterClient(connection), deadline}, nil
}

// WaitUntilReady connects, for a second at most, by a check that charges nothing. Call it at start: connecting takes
// longer than a check may, so that the first one would be let through.
func (l *Limiter) WaitUntilReady(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readyDeadline)
	defer cancel()
	request := &pb.RateLimitRequest{Identifier: "ready", IdentifierType: "user", Endpoint: "/", Peek: true}
	l.checks.CheckRateLimit(ctx, request, grpc.WaitForReady(true)) // without an answer, checks are let through
}

// Check asks for one token. It returns within the deadline, whatever becomes of the node. As endpoint pass the
// template of a route and never the path, which would get a bucket of its own.
func (l *Limiter) Check(ctx context.Context, identifier, identifierType, endpoint string) Decision {
	if identifier == "" || len(identifier) > maxIdentifierBytes || !utf8.ValidString(identifier) {
		return Decision{Reason: "INVALID_REQUEST"}
	}
	ctx, cancel := context.WithTimeout(ctx, l.deadline)
	defer cancel()
	answer, err := l.checks.CheckRateLimit(ctx, &pb.RateLimitRequest{
		Identifier: identifier, IdentifierType: identifierType, Endpoint: endpoint,
	})
	if err != nil {
		return withoutAnswer(status.Code(err))
	}
	return Decision{
		Allowed:           answer.Allowed,
		Remaining:         answer.RemainingTokens,
		RetryAfterSeconds: answer.RetryAfterSeconds,
		Reason:            answer.Reason.String(),
	}
}

// Close ends the connections.
func (l *Limiter) Close() error { return l.connection.Close() }

// withoutAnswer lets the request through, unless it is the check that was wrong: bad input opens nothing.
func withoutAnswer(code codes.Code) Decision {
	if code == codes.InvalidArgument {
		return Decision{Reason: "INVALID_REQUEST"}
	}
	return Decision{Allowed: true, Reason: "NO_ANSWER", Error: code.String()}
}
