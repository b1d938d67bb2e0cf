package admin

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// TraceStore finds messages and dead letters.
type TraceStore interface {
	Trace(ctx context.Context, id string, since time.Time) (queue.TraceResult, error)
	DeadLetters(ctx context.Context, destination, after string, fn func(queue.DeadLetter) bool) error
	Destinations() []string
	DestinationStats(destination string) queue.DestinationStats
}

const (
	// traceTimeout bounds the search in the logs, and then the one in the dead letters.
	traceTimeout = 4 * time.Second
	// maxTracedLetters bounds the dead letters of a trace.
	maxTracedLetters = 100
)

// mountTrace adds GET /trace?id=MESSAGEID[&since=TIME], which returns an adminapi.MessageTrace.
func mountTrace(mux *http.ServeMux, store TraceStore, engine *delivery.Engine) {
	// One search at a time, because it can read the whole disk.
	turn := make(chan struct{}, 1)
	mux.HandleFunc("GET /trace", func(w http.ResponseWriter, r *http.Request) {
		id := r.URL.Query().Get("id")
		var since time.Time
		if text := r.URL.Query().Get("since"); text != "" {
			var err error
			if since, err = time.Parse(time.RFC3339, text); err != nil {
				http.Error(w, "since must be a time such as 2026-01-02T15:04:05Z", http.StatusBadRequest)
				return
			}
		}
		if id == "" {
			http.Error(w, "id is missing; set it to a messageId", http.StatusBadRequest)
			return
		}
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
		case <-r.Context().Done():
			return
		}
		t, err := traceMessage(r.Context(), store, engine, id, since)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set(contentType, "application/json")
		_ = newEncoder(w).Encode(t)
	})
}

func traceMessage(ctx context.Context, store TraceStore, engine *delivery.Engine, id string, since time.Time) (*adminapi.MessageTrace, error) {
	t := &adminapi.MessageTrace{MessageID: id}
	logs, cancel := context.WithTimeout(ctx, traceTimeout)
	result, err := store.Trace(logs, id, since)
	cancel()
	if err != nil {
		return nil, err
	}
	t.Scanned, t.ScannedUntil = result.Scanned, result.Until
	if !result.Complete {
		t.Incomplete = fmt.Sprintf("the search ended after %d messages", result.Scanned)
	}
	t.Attempts = engine.AttemptsOf(id)
	accepted, known := time.Time{}, len(result.Traces) > 0
	for _, one := range result.Traces {
		if accepted.IsZero() || one.AcceptedAt.Before(accepted) {
			accepted = one.AcceptedAt
		}
	}
	letters, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	if err := addLetters(letters, t, store, accepted); err != nil {
		if ctx.Err() != nil || letters.Err() == nil {
			return nil, err
		}
		t.Incomplete = strings.TrimPrefix(t.Incomplete+"; not all dead letters were read", "; ")
	}
	if known {
		t.Accepted = acceptedMessages(result.Traces, t)
	}
	return t, nil
}

// addLetters adds the dead letters of a message that was accepted at a time, which may be unknown.
func addLetters(ctx context.Context, t *adminapi.MessageTrace, store TraceStore, accepted time.Time) error {
	after := ""
	if !accepted.IsZero() {
		// A key begins with the time of the failure; a minute for clocks that were set back.
		key := binary.BigEndian.AppendUint64(nil, uint64(max(accepted.Add(-time.Minute).UnixMilli(), 0)))
		after = hex.EncodeToString(append(key, make([]byte, 16)...))
	}
	for _, name := range store.Destinations() {
		if store.DestinationStats(name).DeadLetters == 0 {
			continue
		}
		err := store.DeadLetters(ctx, name, after, func(d queue.DeadLetter) bool {
			if d.ID == t.MessageID {
				t.DeadLetters = append(t.DeadLetters, show(d, false))
			}
			return len(t.DeadLetters) < maxTracedLetters
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// acceptedMessages refines the states of the store by the attempts and the dead letters.
func acceptedMessages(traces []queue.Trace, t *adminapi.MessageTrace) (list []adminapi.AcceptedMessage) {
	for _, one := range traces {
		m := adminapi.AcceptedMessage{Source: one.Source, AcceptedAt: one.AcceptedAt, Stored: one.Seq > 0, Type: one.Type, Event: one.Event}
		for _, l := range one.Lanes {
			at := adminapi.MessageAtEndpoint{Destination: l.Lane.Destination, Endpoint: l.Lane.Endpoint, State: adminapi.MessageState(l.State), NextAttempt: l.Due, FailedAttempts: l.Attempts}
			same := func(destination, endpoint string) bool {
				return destination == at.Destination && (at.Endpoint == "" || endpoint == "" || endpoint == at.Endpoint)
			}
			if l.State == queue.TraceEnded {
				switch {
				case slices.ContainsFunc(t.Attempts, func(a adminapi.Attempt) bool {
					return a.Reason == "" && a.Source == one.Source && same(a.Destination, a.Endpoint)
				}):
					at.State = adminapi.MessageDelivered
				case slices.ContainsFunc(t.DeadLetters, func(d adminapi.DeadLetter) bool {
					return d.Source == one.Source && same(d.Destination, d.Endpoint)
				}):
					at.State = adminapi.MessageDead
				}
			}
			m.Destinations = append(m.Destinations, at)
		}
		slices.SortFunc(m.Destinations, func(a, b adminapi.MessageAtEndpoint) int {
			return cmp.Or(strings.Compare(a.Destination, b.Destination), strings.Compare(a.Endpoint, b.Endpoint))
		})
		list = append(list, m)
	}
	return list
}
