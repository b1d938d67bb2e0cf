package admin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// TraceStore finds messages and dead letters.
type TraceStore interface {
	Trace(ctx context.Context, id string, since time.Time) (queue.TraceResult, error)
	Search(ctx context.Context, match func(body []byte) bool, since time.Time, max int) (queue.TraceResult, error)
	DeadLetters(ctx context.Context, destination, after string, fn func(queue.DeadLetter) bool) error
	Destinations() []string
	DestinationStats(destination string) queue.DestinationStats
}

const (
	// traceTimeout bounds the search in the logs, and then the one in the dead letters.
	traceTimeout = 4 * time.Second
	// maxTracedMessages and maxTracedLetters bound the messages and the dead letters of a trace.
	maxTracedMessages = 100
	maxTracedLetters  = 100
)

// mountTrace adds GET /trace?id=MESSAGEID[&since=TIME] and GET /trace?userId=USERID[&since=TIME], which
// return an adminapi.MessageTrace.
func mountTrace(mux *http.ServeMux, store TraceStore, engine *delivery.Engine) {
	// One search at a time, because it can read the whole disk.
	turn := make(chan struct{}, 1)
	mux.HandleFunc("GET /trace", func(w http.ResponseWriter, r *http.Request) {
		id, userID := r.URL.Query().Get("id"), r.URL.Query().Get("userId")
		var since time.Time
		if text := r.URL.Query().Get("since"); text != "" {
			var err error
			if since, err = time.Parse(time.RFC3339, text); err != nil {
				http.Error(w, "since must be a time such as 2026-01-02T15:04:05Z", http.StatusBadRequest)
				return
			}
		}
		if (id == "") == (userID == "") {
			http.Error(w, "set id to a messageId, or userId to a user's ID", http.StatusBadRequest)
			return
		}
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
		case <-r.Context().Done():
			return
		}
		var t *adminapi.MessageTrace
		var err error
		if userID != "" {
			t, err = traceUser(r.Context(), store, engine, userID, since)
		} else {
			t, err = traceMessage(r.Context(), store, engine, id, since)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		writeJSON(w, t)
	})
}

func traceMessage(ctx context.Context, store TraceStore, engine *delivery.Engine, id string,
	since time.Time) (*adminapi.MessageTrace, error) {
	t := &adminapi.MessageTrace{MessageID: event.ID(id)}
	logs, cancel := context.WithTimeout(ctx, traceTimeout)
	result, err := store.Trace(logs, id, since)
	cancel()
	if err != nil {
		return nil, err
	}
	addScanned(t, &result)
	t.Attempts = engine.AttemptsOf(id)
	accepted, known := time.Time{}, len(result.Traces) > 0
	for _, one := range result.Traces {
		if accepted.IsZero() || one.AcceptedAt.Before(accepted) {
			accepted = one.AcceptedAt
		}
	}
	if err := addLetters(ctx, t, store, engine, accepted, func(d *queue.DeadLetter) bool { return d.ID == id }); err != nil {
		return nil, err
	}
	if known {
		t.Accepted = acceptedMessages(result.Traces, t)
	}
	return t, nil
}

// traceUser finds the pending messages and the dead letters of a user, accepted since a time or all.
func traceUser(ctx context.Context, store TraceStore, engine *delivery.Engine, userID string,
	since time.Time) (*adminapi.MessageTrace, error) {
	t := &adminapi.MessageTrace{UserID: event.ID(userID)}
	logs, cancel := context.WithTimeout(ctx, traceTimeout)
	result, err := store.Search(logs, func(body []byte) bool { return isOfUser(body, userID) }, since, maxTracedMessages)
	cancel()
	if err != nil {
		return nil, err
	}
	addScanned(t, &result)
	err = addLetters(ctx, t, store, engine, since, func(d *queue.DeadLetter) bool {
		return !d.AcceptedAt.Before(since) && isOfUser(d.Body, userID)
	})
	if err != nil {
		return nil, err
	}
	for _, one := range result.Traces {
		t.Attempts = append(t.Attempts, engine.AttemptsOf(one.ID)...)
	}
	t.Accepted = acceptedMessages(result.Traces, t)
	return t, nil
}

// isOfUser reports whether a message has a userId.
func isOfUser(body []byte, userID string) bool {
	// Few messages pass this test, which is fast. A body without a backslash has all strings unescaped.
	if !bytes.Contains(body, []byte(userID)) && bytes.IndexByte(body, '\\') < 0 {
		return false
	}
	var fields map[string]json.RawMessage // A struct would also match "userid".
	var got event.ID
	return json.Unmarshal(body, &fields) == nil && json.Unmarshal(fields["userId"], &got) == nil && string(got) == userID
}

// addScanned adds how much of the logs was read.
func addScanned(t *adminapi.MessageTrace, result *queue.TraceResult) {
	t.Scanned, t.ScannedUntil = result.Scanned, result.Until
	if result.Storing {
		t.Incomplete = "the message is not durable yet, and its sender has no answer; search again"
		return
	}
	if result.Complete {
		return
	}
	t.Incomplete = fmt.Sprintf("the search ended after %d messages", result.Scanned)
	if !result.Until.IsZero() {
		t.Incomplete += fmt.Sprintf(", the last of which was accepted at %s; search the later ones with a shorter --since", result.Until.UTC().Format(time.RFC3339))
	}
}

// addLetters adds the matching dead letters of messages that were accepted since a time, which is zero if
// it is unknown. The end of its own timeout is no error.
func addLetters(ctx context.Context, t *adminapi.MessageTrace, store TraceStore, engine *delivery.Engine, accepted time.Time,
	match func(*queue.DeadLetter) bool) error {
	letters, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	err := eachLetter(letters, store, accepted, func(d *queue.DeadLetter) bool {
		if !match(d) {
			return letters.Err() == nil
		}
		if len(t.DeadLetters) == maxTracedLetters {
			t.Incomplete = strings.TrimPrefix(fmt.Sprintf("%s; more than %d dead letters", t.Incomplete, maxTracedLetters), "; ")
			return false
		}
		t.DeadLetters = append(t.DeadLetters, show(engine, *d))
		return true
	})
	if letters.Err() == nil || ctx.Err() != nil {
		return err
	}
	t.Incomplete = strings.TrimPrefix(t.Incomplete+"; not all dead letters were read", "; ")
	return nil
}

// eachLetter calls fn for each dead letter that failed since a time, until fn returns false.
func eachLetter(ctx context.Context, store TraceStore, accepted time.Time, fn func(*queue.DeadLetter) bool) error {
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
		more := true
		err := store.DeadLetters(ctx, name, after, func(d queue.DeadLetter) bool {
			more = fn(&d)
			return more
		})
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// acceptedMessages refines the states of the store by the attempts and the dead letters.
func acceptedMessages(traces []queue.Trace, t *adminapi.MessageTrace) (list []adminapi.AcceptedMessage) {
	for _, one := range traces {
		m := adminapi.AcceptedMessage{MessageID: event.ID(one.ID), Source: one.Source, AcceptedAt: one.AcceptedAt, Stored: one.Seq > 0,
			Type: one.Type, Event: one.Event}
		for _, l := range one.Lanes {
			at := adminapi.MessageAtEndpoint{Destination: l.Lane.Destination, Endpoint: l.Lane.Endpoint, State: adminapi.MessageState(l.State),
				NextAttempt: l.Due, FailedAttempts: l.Attempts}
			same := func(destination, endpoint string) bool {
				return destination == at.Destination && (at.Endpoint == "" || endpoint == "" || endpoint == at.Endpoint)
			}
			if l.State == queue.TraceEnded {
				switch {
				case slices.ContainsFunc(t.Attempts, func(a adminapi.Attempt) bool {
					return a.Reason == "" && (one.ID == "" || string(a.MessageID) == one.ID) && a.Source == one.Source && same(a.Destination, a.Endpoint)
				}):
					at.State = adminapi.MessageDelivered
				case slices.ContainsFunc(t.DeadLetters, func(d adminapi.DeadLetter) bool {
					return (one.ID == "" || string(d.MessageID) == one.ID) && d.Source == one.Source && same(d.Destination, d.Endpoint)
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
