// The first check in Go: reads the address of a caller from each line, and prints what a web application would answer.
//
//	yes 192.0.2.7 | head -7 | go run . [HOST:PORT [DEADLINE_MS]]
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"example.com/app/limiter"
)

func main() {
	target, deadline := "127.0.0.1:9090", limiter.DefaultDeadline
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if len(os.Args) > 2 {
		milliseconds, err := strconv.Atoi(os.Args[2])
		if err != nil {
			log.Fatal(err)
		}
		deadline = time.Duration(milliseconds) * time.Millisecond
	}
	checks, err := limiter.New(target, deadline)
	if err != nil {
		log.Fatal(err)
	}
	defer checks.Close()
	ctx := context.Background()
	checks.WaitUntilReady(ctx)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, math.MaxInt) // by itself it would stop at a line of 64 KiB
	for lines.Scan() {
		fmt.Println(answer(checks.Check(ctx, lines.Text(), "ip", "/login")))
	}
}

// answer is the status that an application sends its own caller.
func answer(decision limiter.Decision) string {
	switch {
	case decision.FailOpen():
		return "200 OK (nobody could be asked: " + strings.TrimSpace(decision.Reason+" "+decision.Error) + ")"
	case decision.Allowed:
		return fmt.Sprintf("200 OK (%d left)", decision.Remaining)
	case decision.Reason == "INVALID_REQUEST":
		return "400 Bad Request"
	default:
		return fmt.Sprintf("429 Too Many Requests (Retry-After: %d)", decision.RetryAfterSeconds)
	}
}
