package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// show returns a dead letter without its body.
func show(engine *delivery.Engine, d queue.DeadLetter) adminapi.DeadLetter {
	return adminapi.DeadLetter{
		Key: d.Key, Source: strings.Clone(d.Lane.Source), Destination: d.Lane.Destination, Endpoint: d.Lane.Endpoint,
		MessageID: event.ID(d.ID), Type: d.Type, Event: d.Event, AcceptedAt: d.AcceptedAt, FailedAt: d.Failure.Time, Attempts: d.Attempts,
		Reason: d.Failure.Reason, StatusCode: d.Failure.StatusCode, Message: d.Failure.Message,
		Response: strings.ToValidUTF8(string(engine.ShownResponse(&d)), "\uFFFD"),
	}
}

const (
	maxListed = 10_000
	maxAction = 1 << 20
	// maxBodyTails bounds the memory of clients that follow message bodies.
	maxBodyTails = 4
)

// letters serves dead letters and attempts.
type letters struct {
	Options
	audit audit
	// bodyTails has an item for each client that follows message bodies.
	bodyTails chan struct{}
}

func (l letters) mount(mux *http.ServeMux) {
	// A destination is "namespace/name". These answer with a line of JSON for each dead letter, the oldest first, the
	// number of all, and one.
	mux.HandleFunc("GET /deadletters", ofDestination(l.list)) // [&limit=N][&after=KEY]
	mux.HandleFunc("GET /deadletters/count", ofDestination(l.count))
	mux.HandleFunc("GET /deadletters/{key}", ofDestination(l.one(false)))
	mux.HandleFunc("GET "+adminapi.BodiesPath+"/deadletters/{key}", ofDestination(l.one(true)))
	// The body is an adminapi.DeadLetterAction.
	mux.HandleFunc("POST /deadletters/redeliver", l.redeliver)
	mux.HandleFunc("POST /deadletters/purge", l.purge)
	// The last attempts, and attempts as they end; for those all parameters are optional.
	mux.HandleFunc("GET /attempts", ofDestination(l.attempts)) // [&endpoint=NAME]
	mux.HandleFunc("GET /tail", l.tail)
	mux.HandleFunc("POST /test", ofDestination(l.test)) // [&endpoint=NAME]
	mux.HandleFunc("GET "+adminapi.BodiesPath+"/tail", l.tailWithBodies)
}

type destinationHandler = func(w http.ResponseWriter, r *http.Request, destination string)

// ofDestination returns a handler of requests with the parameter destination.
func ofDestination(next destinationHandler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if destination := r.FormValue("destination"); named(w, destination) {
			next(w, r, destination)
		}
	}
}

func (l letters) list(w http.ResponseWriter, r *http.Request, destination string) {
	limit := maxListed
	if text := r.FormValue("limit"); text != "" {
		var err error
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxListed {
			http.Error(w, fmt.Sprintf("limit must be a number from 1 to %d", maxListed), http.StatusBadRequest)
			return
		}
	}
	out := newLines(w)
	err := l.Store.DeadLetters(r.Context(), destination, r.FormValue("after"), func(d queue.DeadLetter) bool {
		limit--
		return out.Encode(show(l.Engine, d)) == nil && limit > 0
	})
	if err != nil {
		_ = out.Encode(map[string]string{"error": err.Error()})
	}
}

func (l letters) count(w http.ResponseWriter, _ *http.Request, destination string) {
	writeJSON(w, adminapi.DeadLetterCount{Stored: l.Engine.DeadLettersStored(destination)})
}

// one returns the handler for one dead letter.
func (l letters) one(withBody bool) destinationHandler {
	return func(w http.ResponseWriter, r *http.Request, destination string) {
		key := r.PathValue("key")
		found, several, err := l.find(r.Context(), destination, key, withBody)
		switch {
		case several:
			http.Error(w, fmt.Sprintf("several dead letters of %s begin with %s; use more of the key or of the messageId", destination, key), http.StatusConflict)
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case found == nil:
			http.Error(w, fmt.Sprintf("destination %s has no dead letter %s", destination, key), http.StatusNotFound)
		default:
			if withBody {
				l.audit.log(r, "audit: body of a dead letter read", "destination", destination, "key", found.Key, "messageId", found.MessageID)
			}
			writeJSON(w, found)
		}
	}
}

// minPrefix is the shortest begin of a key or a messageId that selects a dead letter.
const minPrefix = 6

// find returns the dead letter with a key or a messageId, or the only one with this begin of either; several is true if
// there are more.
func (l letters) find(ctx context.Context, destination, key string, withBody bool) (found *adminapi.DeadLetter, several bool, err error) {
	var unshown error
	err = l.Store.DeadLetters(ctx, destination, "", func(d queue.DeadLetter) bool {
		exact := d.Key == key || d.ID == key
		if !exact && (len(key) < minPrefix || !strings.HasPrefix(d.Key, key) && !strings.HasPrefix(d.ID, key)) {
			return true
		}
		several = !exact && found != nil
		letter := show(l.Engine, d)
		if withBody {
			var body []byte
			body, unshown = l.Engine.ShownBody(&d)
			letter.Body = bytes.Clone(body)
		}
		found = &letter
		return !exact
	})
	return found, several, errors.Join(err, unshown)
}

func (l letters) redeliver(w http.ResponseWriter, r *http.Request) {
	l.act(w, r, "audit: dead letters redelivered", func(ctx context.Context, from redelivery.Store, destination string,
		s adminapi.DeadLetterSelector, o redelivery.Options) (adminapi.DeadLetterProgress, error) {
		return redelivery.Run(ctx, l.Gate, from, destination, s, o)
	})
}

func (l letters) purge(w http.ResponseWriter, r *http.Request) {
	l.act(w, r, "audit: dead letters purged", redelivery.Purge)
}

// action is redelivery.Purge, or redelivery.Run through a gate.
type action = func(ctx context.Context, from redelivery.Store, destination string, s adminapi.DeadLetterSelector,
	o redelivery.Options) (adminapi.DeadLetterProgress, error)

// act runs the action in the body, and streams its progress.
func (l letters) act(w http.ResponseWriter, r *http.Request, message string, run action) {
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
	send := stream(w)
	p, err := run(r.Context(), l.Store, a.Destination, a.Selector, redelivery.Options{
		Rate: a.Rate, DryRun: a.DryRun, Takes: l.Engine.Takes,
		OnProgress: func(p adminapi.DeadLetterProgress) { _ = send(p) },
	})
	if !a.DryRun {
		l.audit.log(r, message, "destination", a.Destination, "matched", p.Matched, "processed", p.Redelivered)
	}
	p.Done = err == nil
	if err != nil && !errors.Is(err, context.Canceled) {
		p.Error = err.Error()
	}
	_ = send(p)
}

func (l letters) attempts(w http.ResponseWriter, r *http.Request, destination string) {
	writeLines(w, l.Engine.Attempts(destination, r.FormValue("endpoint")))
}

// test sends a test event, and writes the attempts.
func (l letters) test(w http.ResponseWriter, r *http.Request, destination string) {
	list, err := l.Engine.SendTest(r.Context(), destination, r.FormValue("endpoint"))
	switch {
	case errors.Is(err, delivery.ErrNoSuchEndpoint):
		http.Error(w, err.Error(), http.StatusNotFound)
	case errors.Is(err, delivery.ErrTooManyTests):
		http.Error(w, err.Error(), http.StatusTooManyRequests)
	case err != nil:
		http.Error(w, err.Error(), http.StatusConflict)
	default:
		l.audit.log(r, "audit: test event sent", "destination", destination, "requests", len(list))
		writeJSON(w, list)
	}
}

func (l letters) tail(w http.ResponseWriter, r *http.Request) {
	follow(w, l.Engine.Tail(r.Context(), r.FormValue("destination"), r.FormValue("endpoint"), false))
}

func (l letters) tailWithBodies(w http.ResponseWriter, r *http.Request) {
	select {
	case l.bodyTails <- struct{}{}:
		defer func() { <-l.bodyTails }()
	default:
		http.Error(w, fmt.Sprintf("%d clients follow message bodies already; end one of them", maxBodyTails), http.StatusTooManyRequests)
		return
	}
	destination, endpoint := r.FormValue("destination"), r.FormValue("endpoint")
	l.audit.log(r, "audit: reading of bodies started", "destination", destination, "endpoint", endpoint)
	sent := follow(w, l.Engine.Tail(r.Context(), destination, endpoint, true))
	l.audit.log(r, "audit: reading of bodies ended", "destination", destination, "endpoint", endpoint, "bodies", sent)
}

// follow streams attempts, and returns their number.
func follow(w http.ResponseWriter, tail *delivery.Tail) (sent int) {
	send := stream(w)
	for a := range tail.Attempts() {
		if send(a) != nil {
			return sent
		}
		sent++
	}
	return sent
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
