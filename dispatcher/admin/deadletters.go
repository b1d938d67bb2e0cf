package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/termsafe"
)

func show(d queue.DeadLetter, body bool) adminapi.DeadLetter {
	out := adminapi.DeadLetter{
		Key: d.Key, Source: strings.Clone(d.Lane.Source), Destination: d.Lane.Destination, Endpoint: d.Lane.Endpoint,
		MessageID: event.ID(d.ID), Type: d.Type, Event: d.Event, AcceptedAt: d.AcceptedAt, FailedAt: d.Failure.Time, Attempts: d.Attempts,
		Reason: d.Failure.Reason, StatusCode: d.Failure.StatusCode, Message: d.Failure.Message, Response: strings.ToValidUTF8(string(d.Failure.Response), "\uFFFD"),
	}
	if body {
		out.Body = append(json.RawMessage(nil), d.Body...)
	}
	return out
}

const (
	maxListed = 10_000
	maxAction = 1 << 20
	// maxBodyTails bounds the memory of clients that follow message bodies.
	maxBodyTails = 4
	ndjson       = "application/x-ndjson"
	contentType  = "Content-Type"
)

// newEncoder makes an encoder for output that may be shown in a terminal: event names, messageIds
// and receivers' responses are external text.
func newEncoder(w io.Writer) *json.Encoder { return json.NewEncoder(termsafe.NewWriter(w)) }

// mountDeadLetters adds the paths of dead letters and attempts:
//
//	GET  /deadletters?destination=ns/name[&limit=N][&after=KEY]   one line of JSON each, oldest first
//	GET  /deadletters/count?destination=ns/name                   the number of all
//	GET  /deadletters/{key}?destination=ns/name                   one, without its body
//	GET  /bodies/deadletters/{key}?destination=ns/name            one, with its body
//	POST /deadletters/redeliver, /deadletters/purge               an adminapi.DeadLetterAction
//	GET  /attempts?destination=ns/name[&endpoint=E]               the last attempts
//	GET  /tail[?destination=ns/name][&endpoint=E]                 attempts as they end
//	GET  /bodies/tail[?destination=ns/name][&endpoint=E]          the same, with the bodies of the requests
func mountDeadLetters(mux *http.ServeMux, gate *admission.Gate, store redelivery.Store, engine *delivery.Engine, audit audit) {
	mux.HandleFunc("GET /deadletters", func(w http.ResponseWriter, r *http.Request) {
		destination, limit := r.URL.Query().Get("destination"), maxListed
		if text := r.URL.Query().Get("limit"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > maxListed {
				http.Error(w, fmt.Sprintf("limit must be a number from 1 to %d", maxListed), http.StatusBadRequest)
				return
			}
			limit = n
		}
		if !named(w, destination) {
			return
		}
		w.Header().Set(contentType, ndjson)
		out := newEncoder(w)
		err := store.DeadLetters(r.Context(), destination, r.URL.Query().Get("after"), func(d queue.DeadLetter) bool {
			limit--
			return out.Encode(show(d, false)) == nil && limit > 0
		})
		if err != nil {
			_ = out.Encode(map[string]string{"error": err.Error()})
		}
	})
	mux.HandleFunc("GET /deadletters/count", func(w http.ResponseWriter, r *http.Request) {
		if destination := r.URL.Query().Get("destination"); named(w, destination) {
			w.Header().Set(contentType, "application/json")
			_ = newEncoder(w).Encode(adminapi.DeadLetterCount{Stored: engine.DeadLettersStored(destination)})
		}
	})
	one := func(w http.ResponseWriter, r *http.Request, body bool) {
		destination, key := r.URL.Query().Get("destination"), r.PathValue("key")
		if !named(w, destination) {
			return
		}
		var found *adminapi.DeadLetter
		err := store.DeadLetters(r.Context(), destination, "", func(d queue.DeadLetter) bool {
			if d.Key == key {
				letter := show(d, body)
				found = &letter
			}
			return found == nil
		})
		switch {
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case found == nil:
			http.Error(w, fmt.Sprintf("destination %s has no dead letter %s", destination, key), http.StatusNotFound)
		default:
			if body {
				audit.log(r, "audit: body of a dead letter read", "destination", destination, "key", key, "messageId", found.MessageID)
			}
			w.Header().Set(contentType, "application/json")
			_ = newEncoder(w).Encode(found)
		}
	}
	mux.HandleFunc("GET /deadletters/{key}", func(w http.ResponseWriter, r *http.Request) { one(w, r, false) })
	mux.HandleFunc("GET "+adminapi.BodiesPath+"/deadletters/{key}", func(w http.ResponseWriter, r *http.Request) { one(w, r, true) })
	type action = func(context.Context, adminapi.DeadLetterAction, redelivery.Options) (adminapi.DeadLetterProgress, error)
	act := func(run action, message string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			var a adminapi.DeadLetterAction
			dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxAction))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&a); err != nil {
				http.Error(w, "the body is not a valid action: "+err.Error(), http.StatusBadRequest)
				return
			}
			if !named(w, a.Destination) {
				return
			}
			w.Header().Set(contentType, ndjson)
			out, control := newEncoder(w), http.NewResponseController(w)
			// A large redelivery runs longer than the server's timeouts.
			_ = control.SetReadDeadline(time.Time{})
			_ = control.Flush()
			p, err := run(r.Context(), a, redelivery.Options{
				Rate: a.Rate, DryRun: a.DryRun, Takes: engine.Takes,
				OnProgress: func(p adminapi.DeadLetterProgress) {
					_ = out.Encode(p)
					_ = control.Flush()
				},
			})
			if !a.DryRun {
				audit.log(r, message, "destination", a.Destination, "matched", p.Matched, "processed", p.Redelivered)
			}
			last := p
			last.Done = err == nil
			if err != nil && !errors.Is(err, context.Canceled) {
				last.Error = err.Error()
			}
			_ = out.Encode(last)
		}
	}
	mux.HandleFunc("POST /deadletters/redeliver", act(func(ctx context.Context, a adminapi.DeadLetterAction, o redelivery.Options) (adminapi.DeadLetterProgress, error) {
		return redelivery.Run(ctx, gate, store, a.Destination, a.Selector, o)
	}, "audit: dead letters redelivered"))
	mux.HandleFunc("POST /deadletters/purge", act(func(ctx context.Context, a adminapi.DeadLetterAction, o redelivery.Options) (adminapi.DeadLetterProgress, error) {
		return redelivery.Purge(ctx, store, a.Destination, a.Selector, o)
	}, "audit: dead letters purged"))
	mux.HandleFunc("GET /attempts", func(w http.ResponseWriter, r *http.Request) {
		destination, endpoint := r.URL.Query().Get("destination"), r.URL.Query().Get("endpoint")
		if !named(w, destination) {
			return
		}
		w.Header().Set(contentType, ndjson)
		out := newEncoder(w)
		for _, a := range engine.Attempts(destination, endpoint) {
			_ = out.Encode(a)
		}
	})
	follow := func(w http.ResponseWriter, attempts iter.Seq[adminapi.AttemptWithBody]) (sent int) {
		w.Header().Set(contentType, ndjson)
		out, control := newEncoder(w), http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Time{})
		_ = control.Flush()
		for a := range attempts {
			if out.Encode(a) != nil {
				return sent
			}
			sent++
			_ = control.Flush()
		}
		return sent
	}
	mux.HandleFunc("GET /tail", func(w http.ResponseWriter, r *http.Request) {
		follow(w, engine.Tail(r.Context(), r.URL.Query().Get("destination"), r.URL.Query().Get("endpoint")).Attempts())
	})
	free := make(chan struct{}, maxBodyTails)
	mux.HandleFunc("GET "+adminapi.BodiesPath+"/tail", func(w http.ResponseWriter, r *http.Request) {
		select {
		case free <- struct{}{}:
			defer func() { <-free }()
		default:
			http.Error(w, fmt.Sprintf("%d clients follow message bodies already; end one of them", maxBodyTails), http.StatusTooManyRequests)
			return
		}
		destination, endpoint := r.URL.Query().Get("destination"), r.URL.Query().Get("endpoint")
		audit.log(r, "audit: reading of bodies started", "destination", destination, "endpoint", endpoint)
		sent := follow(w, engine.TailWithBodies(r.Context(), destination, endpoint).Attempts())
		audit.log(r, "audit: reading of bodies ended", "destination", destination, "endpoint", endpoint, "bodies", sent)
	})
}

// named answers 400 if the destination is not given as namespace/name.
func named(w http.ResponseWriter, destination string) bool {
	namespace, name, ok := strings.Cut(destination, "/")
	if ok && namespace != "" && name != "" {
		return true
	}
	http.Error(w, "destination must have the form namespace/name", http.StatusBadRequest)
	return false
}
