// Package forward sends the dead letters of a destination to another destination of the namespace,
// as messages of the built-in Source liveconfig.SourceDeadLetters.
//
// The durable position of a destination is the key of its last dead letter that was forwarded. A
// page of dead letters is appended to the queue before the position behind it is stored, so that a
// crash in between forwards at most one page again and loses none. A dead letter of the built-in
// Source itself is not forwarded, so every message is forwarded at most once, whatever the
// destinations refer to. The main types are Service and Options.
package forward

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/redact"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	tick      = time.Second
	keyPrefix = "forward/"
	// pageLetters and pageBytes bound the dead letters in memory.
	pageLetters = 100
	pageBytes   = 1 << 20
	// maxBackoff is the longest wait after an error.
	maxBackoff = time.Minute
)

// Store is the part of queue.Store that a Service uses.
type Store interface {
	DeadLetters(ctx context.Context, destination, after string, fn func(queue.DeadLetter) bool) error
	DeadLetterMark(destination string) (string, error)
	queue.Meta
}

// Options configure a Service. Gate and Store are required.
type Options struct {
	// Gate is the way into the queue of Store.
	Gate  *admission.Gate
	Store Store
	// Changes is marked when the report of a destination changes; nil marks nothing.
	Changes *changes.Log
	Logger  *slog.Logger
}

// Service forwards the dead letters of all destinations of the live config that request it.
type Service struct {
	Options
	// view is the live config that wanted is from.
	view   *liveconfig.View
	wanted []letters
	// waits are the destinations with errors ("namespace/name").
	waits map[string]wait

	mu sync.Mutex
	// applied is the view of the last Apply.
	applied *liveconfig.View
	// positions are the durable positions, by destination ("namespace/name"). Apply adds
	// them, and only Run changes and removes them.
	positions map[string]position
}

// letters are the dead letters of a destination and the destination that gets them.
type letters struct{ namespace, from, to string }

func (l letters) key() string { return l.namespace + "/" + l.from }

// position is stored as JSON.
type position struct {
	// After is the key of the last dead letter that needs no more work.
	After string `json:"after"`
	// Forwarded counts dead letters.
	Forwarded int64 `json:"forwarded"`
}

// wait is the state of a destination after consecutive errors.
type wait struct {
	errors int
	until  time.Time
}

// New returns a Service that continues at the stored positions. It must be called before dead letters
// are made.
func New(o Options) (*Service, error) {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	s := &Service{Options: o, positions: map[string]position{}, waits: map[string]wait{}}
	values, err := o.Store.AllMeta()
	if err != nil {
		return nil, err
	}
	for name, value := range values {
		key, ours := strings.CutPrefix(name, keyPrefix)
		if !ours {
			continue
		}
		var p position
		if err := json.Unmarshal(value, &p); err != nil {
			// Repeated dead letters are better than missing ones, or than a failing start.
			o.Logger.Error("position of forwarded dead letters unreadable; stored dead letters are forwarded again", "destination", key, "error", err)
			p = position{}
		}
		mark, err := o.Store.DeadLetterMark(key)
		if err != nil {
			return nil, fmt.Errorf("find the dead letters to forward: %w", err)
		}
		// Later dead letters may get smaller keys than a position whose dead letters are deleted.
		p.After = min(p.After, mark)
		s.positions[key] = p
	}
	return s, nil
}

// Run forwards dead letters until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	timer := time.NewTicker(tick)
	defer timer.Stop()
	for {
		if view := s.Gate.View(); view != nil {
			s.follow(view)
			s.forwardAll(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// Apply stores the positions of the destinations that forward their dead letters from this view on.
// It must be called before dead letters are made by the view, so that none is missed.
func (s *Service) Apply(view *liveconfig.View) error {
	s.mu.Lock()
	s.applied = nil // follow removes no position of the last view while this one is applied.
	s.mu.Unlock()
	for _, l := range wantedBy(view) {
		s.mu.Lock()
		_, known := s.positions[l.key()]
		s.mu.Unlock()
		if known {
			continue
		}
		mark, err := s.Store.DeadLetterMark(l.key())
		if err != nil {
			return err
		}
		// A power loss that loses the position also loses all dead letters behind it.
		if err := s.put(l, position{After: mark}, s.Store.PutMeta); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applied = view
	return nil
}

// wantedBy lists the dead letters to forward.
func wantedBy(view *liveconfig.View) (wanted []letters) {
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for i := range config.Destinations {
			if d := &config.Destinations[i]; d.DeadLetters.ForwardTo != "" {
				wanted = append(wanted, letters{namespace, d.Name, d.DeadLetters.ForwardTo})
			}
		}
	}
	return wanted
}

// follow finds what a new live config requests, and removes the positions of the other destinations
// that are not parked.
func (s *Service) follow(view *liveconfig.View) {
	if view == s.view {
		return
	}
	s.view, s.wanted = view, wantedBy(view)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.applied != view {
		return // Apply has added positions for a newer view.
	}
	ended := maps.Clone(s.positions)
	for _, l := range s.wanted {
		delete(ended, l.key())
	}
	for key := range ended {
		namespace, name, _ := strings.Cut(key, "/")
		if view.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name}) {
			continue
		}
		if err := s.Store.PutMeta(keyPrefix+key, nil); err != nil {
			s.Logger.Error("removing the position of forwarded dead letters failed", "destination", key, "error", err)
			continue
		}
		delete(s.positions, key)
		delete(s.waits, key)
	}
}

// forwardAll forwards a page of each destination in turn, until no destination has more.
func (s *Service) forwardAll(ctx context.Context) {
	todo := slices.Clone(s.wanted)
	for len(todo) > 0 && ctx.Err() == nil && s.Gate.View() == s.view {
		todo = slices.DeleteFunc(todo, func(l letters) bool {
			if ctx.Err() != nil || time.Now().Before(s.waits[l.key()].until) {
				return true
			}
			more, err := s.forward(ctx, l)
			s.pace(ctx, l, err)
			return !more || err != nil
		})
	}
}

// pace lengthens the wait of a destination after an error, and ends it otherwise.
func (s *Service) pace(ctx context.Context, l letters, err error) {
	if err == nil || ctx.Err() != nil {
		delete(s.waits, l.key())
		return
	}
	n := s.waits[l.key()].errors
	s.waits[l.key()] = wait{n + 1, time.Now().Add(min(tick<<min(n, 10), maxBackoff))}
	if n == 0 {
		s.Logger.Warn("forwarding dead letters failed; they wait and are retried", "namespace", l.namespace, "destination", l.from, "target",
			l.to, "error", err)
	}
}

// errNoTarget is the error of dead letters whose target cannot take them.
var errNoTarget = errors.New("the target does not exist or cannot take dead letters; the condition ResolvedRefs has the reason")

// forward forwards the next page of a destination's dead letters. more is true if there may be
// further ones.
func (s *Service) forward(ctx context.Context, l letters) (more bool, err error) {
	mark, err := s.Store.DeadLetterMark(l.key())
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	p := s.positions[l.key()]
	s.mu.Unlock()
	if p.After == mark {
		return false, nil
	}
	page, after, err := s.read(ctx, l, p.After, mark)
	if err != nil {
		return false, err
	}
	p.After = after
	if len(page) == 0 {
		// The position is stored with the next dead letter.
		s.mu.Lock()
		defer s.mu.Unlock()
		s.positions[l.key()] = p
		return after != mark, nil
	}
	if err := s.append(ctx, l, page); err != nil {
		return false, err
	}
	p.Forwarded += int64(len(page))
	return after != mark, s.put(l, p, s.Store.PutMetaDurable)
}

// read returns the messages of the next dead letters, and the position behind them. A damaged dead
// letter has no body and is skipped, as is one that was forwarded to this destination.
func (s *Service) read(ctx context.Context, l letters, after, mark string) (page []queue.Message, position string, err error) {
	rules := s.rules(l)
	var broken error
	size, builtIn := 0, l.namespace+"/"+liveconfig.SourceDeadLetters
	position = mark
	err = s.Store.DeadLetters(ctx, l.key(), after, func(d queue.DeadLetter) bool {
		if d.Key > mark {
			return false
		}
		if size >= pageBytes || len(page) >= pageLetters {
			position = after
			return false
		}
		after = d.Key
		if d.Lane.Source != builtIn && d.Failure.Reason != queue.ReasonDamaged {
			var m queue.Message
			if m, broken = message(l, d, rules); broken != nil {
				return false
			}
			page = append(page, m)
			size += len(m.Body)
		}
		return true
	})
	return page, position, errors.Join(err, broken)
}

// rules returns the present rules of redaction of a destination; nil if it has none.
func (s *Service) rules(l letters) *liveconfig.Redact {
	config, _ := s.view.Namespace(l.namespace)
	for i := range config.Destinations {
		if d := &config.Destinations[i]; d.Name == l.from {
			return d.Redact
		}
	}
	return nil
}

// append appends messages for the target. It waits for a target that cannot take them.
func (s *Service) append(ctx context.Context, l letters, page []queue.Message) error {
	routing := s.Gate.Begin()
	defer routing.End()
	config, _ := routing.View().Namespace(l.namespace)
	if !slices.ContainsFunc(config.Destinations, func(d liveconfig.Destination) bool {
		return d.Name == l.to && d.DeadLetters.ForwardTo == "" && slices.Contains(d.Sources, liveconfig.SourceDeadLetters)
	}) {
		return errNoTarget
	}
	_, err := routing.Append(ctx, page)
	return err
}

// put stores a position.
func (s *Service) put(l letters, p position, store func(name string, value []byte) error) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := store(keyPrefix+l.key(), text); err != nil {
		return err
	}
	s.mu.Lock()
	s.positions[l.key()] = p
	s.mu.Unlock()
	s.Changes.Object(changes.Destinations, l.namespace, l.from).Numbers()
	return nil
}

// Forwarded returns the number of dead letters of a destination that were forwarded, since its config
// requests it.
func (s *Service) Forwarded(namespace, name string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.positions[namespace+"/"+name].Forwarded
}

// Unfinished lists the destinations whose dead letters are not all forwarded, "namespace/name".
func (s *Service) Unfinished(view *liveconfig.View) (names []string, err error) {
	for _, l := range wantedBy(view) {
		mark, err := s.Store.DeadLetterMark(l.key())
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		p, known := s.positions[l.key()]
		s.mu.Unlock()
		if known && p.After < mark {
			names = append(names, l.key())
		}
	}
	return names, nil
}

// Details is the field deadLetter of a forwarded message.
type Details struct {
	// Destination, Endpoint and Source are the names of the objects; Endpoint is empty if the
	// message was not for a single endpoint.
	Destination string `json:"destination"`
	Endpoint    string `json:"endpoint,omitempty"`
	Source      string `json:"source"`
	// Reason, StatusCode and Message describe the last failure.
	Reason     string `json:"reason"`
	StatusCode int    `json:"statusCode,omitempty"`
	Message    string `json:"message,omitempty"`
	// Attempts is the number of requests that failed.
	Attempts   int       `json:"attempts"`
	AcceptedAt time.Time `json:"acceptedAt"`
	FailedAt   time.Time `json:"failedAt"`
}

// message returns the message that forwards a dead letter, redacted by the rules at its death and the present ones.
func message(l letters, d queue.DeadLetter, now *liveconfig.Redact) (queue.Message, error) {
	redactor, err := redact.Stored(d.Failure.Redact, now)
	if err != nil {
		return queue.Message{}, err
	}
	shown, _, err := redactor.Apply(d.Body)
	if err != nil {
		return queue.Message{}, err
	}
	_, source, _ := strings.Cut(d.Lane.Source, "/")
	body := withDetails(shown, Details{
		Destination: l.from, Endpoint: d.Lane.Endpoint, Source: source,
		Reason: d.Failure.Reason, StatusCode: d.Failure.StatusCode, Message: d.Failure.Message,
		Attempts: d.Attempts, AcceptedAt: d.AcceptedAt.UTC(), FailedAt: d.Failure.Time.UTC(),
	})
	return queue.Message{
		Source: l.namespace + "/" + liveconfig.SourceDeadLetters, Only: l.namespace + "/" + l.to,
		ID: messageID(d), Type: strings.Clone(d.Type), Event: strings.Clone(d.Event), AcceptedAt: time.Now(),
		LongNumbers: !event.IsFixedPoint(shown), Body: body,
	}, nil
}

// messageID is the ID of a forwarded message. It differs from the ID of the original message, because
// the target may get both, and one message may become a dead letter of several endpoints; and it is
// equal when a dead letter is forwarded again after a crash.
func messageID(d queue.DeadLetter) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s %d", d.Lane.Source, d.Lane.Destination, d.Lane.Endpoint, d.Seq))
	return fmt.Sprintf("dead-letter-%x", sum[:16])
}

// field is the name of the field with the Details.
const field = "deadLetter"

// withDetails appends the field deadLetter to a message, which is a JSON object with at least one
// field. The other bytes of the message are unchanged, unless its client set a field of this name.
func withDetails(body []byte, d Details) []byte {
	if bytes.Contains(body, []byte(`"`+field+`"`)) {
		body = without(body, field)
	}
	out := slices.Concat(bytes.TrimSuffix(body, []byte("}")), []byte(`,"`+field+`":`), encode(d))
	return append(out, '}')
}

// without returns a JSON object without a field.
func without(object []byte, field string) []byte {
	var fields map[string]json.RawMessage
	if json.Unmarshal(object, &fields) != nil {
		return object // Cannot happen: accepted messages are JSON objects.
	}
	delete(fields, field)
	return encode(fields)
}

// encode returns a value as JSON, in the form of canonical messages. The values cannot fail.
func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
