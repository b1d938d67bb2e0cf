package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
)

// The notifier reports READY once and only when calls are accepted, WATCHDOG only while the process
// answers, and STOPPING at the end.
func TestNotifySystemd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "30000")
	receive := func() string {
		t.Helper()
		_ = socket.SetReadDeadline(time.Now().Add(time.Minute))
		text := make([]byte, 100)
		size, err := socket.Read(text)
		if err != nil {
			t.Fatalf("no report: %v", err)
		}
		return string(text[:size])
	}
	var accepting, answering atomic.Bool
	var looks atomic.Int64
	n := &notifier{log: slog.New(slog.DiscardHandler), poll: time.Millisecond,
		ready: func() error {
			looks.Add(1)
			if !accepting.Load() {
				return errors.New("waiting for the first full config")
			}
			return nil
		},
		alive: func(context.Context) error {
			looks.Add(1)
			if !answering.Load() {
				return errors.New("no answer")
			}
			return nil
		}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.run(ctx) }()
	for looks.Load() < 20 {
		time.Sleep(time.Millisecond)
	}
	accepting.Store(true)
	if got := receive(); got != "READY=1" {
		t.Errorf("first report: got %q, want READY=1: neither one before calls are accepted nor a WATCHDOG without an answer", got)
	}
	answering.Store(true)
	for range 3 {
		if got := receive(); got != "WATCHDOG=1" {
			t.Errorf("next report: got %q, want WATCHDOG=1", got)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("run: got %v, want no error", err)
	}
	last := receive()
	for last == "WATCHDOG=1" {
		last = receive()
	}
	if last != "STOPPING=1" {
		t.Errorf("last report: got %q, want STOPPING=1", last)
	}
}
