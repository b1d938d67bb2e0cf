// Command tool is the suite's sender and receiver in pods.
//
// With -listen it receives requests and prints their headers and exact bodies; with -client, only those
// with an access token and valid signatures. With -stop it stops the sender in the same pod. Otherwise it sends track calls at a
// constant rate until it is stopped. It retries each call until it is acknowledged, and
// exits with 1 if one was not. The messageIds are PREFIX-0 to PREFIX-(N-1), where N is the
// first number that it prints at its end.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	url := flag.String("url", "", "URL of Posthorn for calls")
	prefix := flag.String("prefix", "call", "start of the messageIds")
	rate := flag.Int("rate", 100, "calls per second")
	retryWindow := flag.Duration("retry-window", 3*time.Minute, "time for which a call is retried")
	listen := flag.String("listen", "", "address for requests; with it, no calls are sent")
	pair := flag.String("pair", "", "file with the certificate and the key for requests over TLS")
	client := flag.String("client", "", "ID:SECRET of the client that gets access tokens at /token; with it, requests need a token and signatures")
	secret := flag.String("secret", "", "secret of the signatures")
	stop := flag.Bool("stop", false, "stop the sender of this pod")
	flag.Parse()
	switch {
	case *listen != "":
		receiver := record()
		if *client != "" {
			receiver = protect(*client, *secret, receiver)
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

	stopped, _ := signal.NotifyContext(context.Background(), syscall.SIGINT)
	s := sender{url: strings.TrimSuffix(*url, "/") + "/v1/track", key: os.Getenv("POSTHORN_WRITE_KEY"), retryWindow: *retryWindow, client: &http.Client{Timeout: 10 * time.Second}}
	ids := make(chan string)
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			for id := range ids {
				s.send(id)
			}
		})
	}
	tick := time.NewTicker(time.Second / time.Duration(*rate))
	for i := 0; stopped.Err() == nil; i++ {
		ids <- fmt.Sprintf("%s-%d", *prefix, i)
		<-tick.C
	}
	close(ids)
	group.Wait()
	fmt.Printf("%d acknowledged, %d failed, %d retries\n", s.acknowledged, s.failed, s.retries)
	if s.failed > 0 {
		os.Exit(1)
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

type sender struct {
	url, key    string
	retryWindow time.Duration
	client      *http.Client

	mu                            sync.Mutex
	acknowledged, failed, retries int
}

func (s *sender) send(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), s.retryWindow)
	defer cancel()
	body := fmt.Sprintf(`{"messageId":%q,"userId":"load","event":"Load"}`, id)
	for tries := 0; ; tries++ {
		err := s.post(ctx, body)
		s.mu.Lock()
		if tries > 0 {
			s.retries++
		}
		if err == nil {
			s.acknowledged++
			s.mu.Unlock()
			return
		}
		if ctx.Err() != nil {
			s.failed++
			s.mu.Unlock()
			fmt.Printf("call %s was not acknowledged: %v\n", id, err)
			return
		}
		s.mu.Unlock()
		time.Sleep(200 * time.Millisecond)
	}
}

func (s *sender) post(ctx context.Context, body string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.SetBasicAuth(s.key, "")
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", resp.Status)
	}
	return nil
}
