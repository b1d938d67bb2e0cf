// Command tool is the suite's sender and receiver in pods.
//
// With -listen it receives requests and prints their headers and exact bodies; with -client, only those
// with an access token and valid signatures. With -stop it stops the sender in the same pod. Otherwise it sends track calls at a
// constant rate by the Go client, until it is stopped. The client retries each call until it is
// acknowledged; the exit code is 1 if one was not. The messageIds are PREFIX-0 to PREFIX-(N-1), where N is the
// first number that it prints at its end.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/analytics"
)

func main() {
	url := flag.String("url", "", "URL of Posthorn for calls")
	prefix := flag.String("prefix", "call", "start of the messageIds")
	rate := flag.Int("rate", 100, "calls per second")
	retryWindow := flag.Duration("retry-window", 3*time.Minute, "time for which a call is retried")
	listen := flag.String("listen", "", "address for requests; with it, no calls are sent")
	pair := flag.String("pair", "", "file with the certificate and the key for requests over TLS")
	accessClient := flag.String("client", "", "ID:SECRET of the client that gets access tokens at /token; with it, requests need a token and signatures")
	secret := flag.String("secret", "", "secret of the signatures")
	stop := flag.Bool("stop", false, "stop the sender of this pod")
	flag.Parse()
	switch {
	case *listen != "":
		receiver := record()
		if *accessClient != "" {
			receiver = protect(*accessClient, *secret, receiver)
		}
		if *pair != "" {
			fail(http.ListenAndServeTLS(*listen, *pair, *pair, receiver))
		}
		fail(http.ListenAndServe(*listen, receiver))
	case *stop:
		if err := syscall.Kill(1, syscall.SIGINT); err != nil {
			fail(err)
		}
		return
	}

	var acknowledged, failed, retries atomic.Int64
	client := analytics.New(os.Getenv("POSTHORN_WRITE_KEY"), analytics.WithEndpoint(*url), analytics.FlushAt(1), analytics.Blocking(),
		analytics.RetryFor(*retryWindow),
		analytics.WithLogger(slog.New(slog.DiscardHandler)), // The output begins with the numbers.
		analytics.OnResult(func(r analytics.Result) {
			retries.Add(int64(max(0, r.Attempts-1)))
			if r.Err == nil {
				acknowledged.Add(1)
				return
			}
			failed.Add(1)
			fmt.Printf("call %s was not acknowledged: %v\n", r.MessageID, r.Err)
		}))
	stopped, _ := signal.NotifyContext(context.Background(), syscall.SIGINT)
	tick := time.NewTicker(time.Second / time.Duration(*rate))
	for i := 0; stopped.Err() == nil; i++ {
		if err := client.Track(&analytics.Track{Message: analytics.Message{MessageId: fmt.Sprintf("%s-%d", *prefix, i)}, UserId: "load",
			Event: "Load"}); err != nil {
			fail(err)
		}
		<-tick.C
	}
	ctx, cancel := context.WithTimeout(context.Background(), *retryWindow)
	defer cancel()
	_ = client.CloseContext(ctx) // OnResult reports each failure.
	fmt.Printf("%d acknowledged, %d failed, %d retries\n", acknowledged.Load(), failed.Load(), retries.Load())
	if failed.Load() > 0 {
		fail(errors.New("some calls were not acknowledged"))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// record returns a handler that prints requests.
func record() http.Handler {
	var mu sync.Mutex
	return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"headers": r.Header, "body": string(body)})
	})
}
