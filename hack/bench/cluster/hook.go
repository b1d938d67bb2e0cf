package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/test/signature"
)

const (
	versionHeader = "X-Bench-Version"
	firstSecret   = "the-first-secret"
)

// hook is the receiver of all destinations.
type hook struct {
	*httptest.Server

	mu      sync.Mutex
	path    string
	version string
	// signed is true if the version is the signing secret and not the header.
	signed bool
	seen   []chan time.Time
}

func newHook() *hook {
	h := &hook{}
	h.Server = httptest.NewServer(h)
	return h
}

func (h *hook) close() { h.Server.Close() }

// expect returns a channel per dispatcher with the time of its first delivery to
// path that has the version, or is signed with it.
func (h *hook) expect(path, version string, signed bool) []chan time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.path, h.version, h.signed, h.seen = path, version, signed, nil
	for range *dispatchers {
		h.seen = append(h.seen, make(chan time.Time, 1))
	}
	return h.seen
}

func (h *hook) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.URL.Path != h.path {
		return
	}
	if h.signed {
		if r.Header.Get("X-Signature") != signature.SHA1(h.version, body) {
			return
		}
	} else if r.Header.Get(versionHeader) != h.version {
		return
	}
	// A messageId begins with the number of the dispatcher that accepted the call.
	number, _, _ := strings.Cut(r.Header.Get("Idempotency-Key"), "-")
	if pod, err := strconv.Atoi(number); err == nil && pod < len(h.seen) {
		select {
		case h.seen[pod] <- now:
		default:
		}
	}
}
