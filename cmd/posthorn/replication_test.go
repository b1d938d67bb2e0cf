package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

// A dispatcher waits for the store of its predecessor, logs that once, and does not wait after other errors.
func TestOpenWhenFree(t *testing.T) {
	inUse, broken := fmt.Errorf("in use: %w", syscall.EAGAIN), errors.New("broken")
	for name, c := range map[string]struct {
		free   time.Duration // When the store becomes free.
		cancel time.Duration
		then   error
		wait   time.Duration
		want   error
		after  time.Duration
		logs   int
	}{
		"free":              {0, time.Hour, nil, lockWait, nil, 0, 0},
		"free after 13 s":   {13 * time.Second, time.Hour, nil, lockWait, nil, 13 * time.Second, 1},
		"never free":        {time.Hour, time.Hour, nil, lockWait, inUse, lockWait, 1},
		"damaged":           {0, time.Hour, broken, lockWait, broken, 0, 0},
		"then damaged":      {2 * time.Second, time.Hour, broken, lockWait, broken, 2 * time.Second, 1},
		"without a wait":    {time.Hour, time.Hour, nil, 0, inUse, 0, 0},
		"the process stops": {time.Hour, 5500 * time.Millisecond, nil, lockWait, inUse, 5500 * time.Millisecond, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.cancel)
			defer cancel()
			var logged bytes.Buffer
			start := time.Now()
			_, err := openWhenFree(ctx, slog.New(slog.NewTextHandler(&logged, nil)), c.wait, func() (int, error) {
				if time.Since(start) < c.free {
					return 0, inUse
				}
				return 1, c.then
			})
			check.Equal(t, name+": error", err, c.want)
			check.Equal(t, name+": duration", time.Since(start), c.after)
			check.Equal(t, name+": log lines", strings.Count(logged.String(), "waiting for another process"), c.logs)
		})
	}
}
