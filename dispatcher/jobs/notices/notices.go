// Package notices sends notices about the operation of this dispatcher to the webhooks of a
// namespace, as track calls of the built-in Source liveconfig.SourceNotices.
//
// The Service compares the dispatcher's report with the stored records of earlier notices. A fact
// that differs from its record becomes a message, appended through admission, and then the record is
// stored. So a crash repeats a notice and loses none, and a fact that ends within its pause
// sends none. Only the facts of namespaces with a destination that gets notices are read.
package notices

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

const (
	tick      = 5 * time.Second
	keyPrefix = "notices/"
	// maxNotices bounds the notices of a namespace in one tick. The others wait for the next one.
	maxNotices = 10
)

// Options configure a Service. Gate, Store, Changes and DiskLeft are required.
type Options struct {
	// Gate is the way into the queue. Its HighWater is the share of the disk above which the store
	// accepts no calls.
	Gate  *admission.Gate
	Store Store
	// Changes returns what changed since the cursor of an earlier report, or nil.
	Changes func(cursor string) *adminapi.Report
	// Pod is the name of this dispatcher. Namespace gets the notices about its disk; empty for
	// none.
	Pod, Namespace string
	// DiskLeft is admission.Gate.DiskLeft.
	DiskLeft func() (left, total float64, ok bool)
	Logger   *slog.Logger
}

// Store stores the records of notices. It counts dead letters of deleted destinations while it has some.
type Store interface {
	queue.Meta
	DestinationStats(destination string) queue.DestinationStats
}

// Service sends notices. Only Run uses its fields.
type Service struct {
	Options
	view *liveconfig.View
	// namespaces are those with a destination that gets notices, sorted. index has only their reports.
	namespaces []string
	index      *podreport.Index
	// records are the reported values, by namespace and the key of the fact.
	records map[string]map[string]record
	failing bool
	// started is when Run began.
	started time.Time
}

// record is the last notice about a fact.
type record struct {
	Value string    `json:"value"`
	Time  time.Time `json:"time"`
}

// New returns a Service with the stored records.
func New(o Options) (*Service, error) {
	o.Logger = cmp.Or(o.Logger, slog.Default())
	s := &Service{Options: o, records: map[string]map[string]record{}}
	values, err := o.Store.AllMeta()
	if err != nil {
		return nil, err
	}
	for name, value := range values {
		path, ours := strings.CutPrefix(name, keyPrefix)
		namespace, key, _ := strings.Cut(path, "/")
		var r record
		if !ours || json.Unmarshal(value, &r) != nil { // A repeated notice is better than a failing start.
			continue
		}
		s.remember(namespace, key, r)
	}
	return s, nil
}

func (s *Service) remember(namespace, key string, r record) {
	if s.records[namespace] == nil {
		s.records[namespace] = map[string]record{}
	}
	s.records[namespace][key] = r
}

// Run sends notices until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	s.started = time.Now()
	timer := time.NewTicker(tick)
	defer timer.Stop()
	for {
		if view := s.Gate.View(); view != nil {
			err := s.pass(ctx, view)
			if failing := err != nil && ctx.Err() == nil; failing != s.failing {
				if s.failing = failing; failing {
					s.Logger.Warn("sending notices failed; they are retried", "error", err)
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// pass sends the notices that are due.
func (s *Service) pass(ctx context.Context, view *liveconfig.View) error {
	now := time.Now()
	if view != s.view {
		s.follow(view, now)
	}
	if len(s.namespaces) == 0 {
		return nil
	}
	cursor := ""
	if s.index != nil {
		cursor = s.index.Cursor
	}
	if r := s.Changes(cursor); r != nil {
		r.Namespaces = slices.DeleteFunc(r.Namespaces, func(n adminapi.NamespaceReport) bool { return !s.subscribed(n.Namespace) })
		s.index, _ = s.index.Merge(*r, nil)
	}
	if s.index == nil {
		return nil
	}
	var errs []error // The error of a namespace, as a full quota, delays no other.
	for _, namespace := range s.namespaces {
		config, _ := view.Namespace(namespace)
		list := facts(config.Config, s.index.Namespace(namespace), s.index.Config(namespace), s.records[namespace], now)
		if namespace == s.Namespace {
			if left, total, ok := s.DiskLeft(); ok {
				if f := disk(left, total, s.Gate.HighWater, s.records[namespace]); f.due(s.records[namespace]["disk"], now) {
					list = append(list, f)
				}
			}
		}
		if now.Sub(s.started) < trafficPause {
			list = slices.DeleteFunc(list, func(f fact) bool { return f.event == NoTraffic })
		}
		if err := s.send(ctx, namespace, list, now); err != nil {
			errs = append(errs, fmt.Errorf("namespace %s: %w", namespace, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Service) subscribed(namespace string) bool {
	_, found := slices.BinarySearch(s.namespaces, namespace)
	return found
}

// follow finds the namespaces that get notices, and removes the records of deleted objects.
func (s *Service) follow(view *liveconfig.View, now time.Time) {
	s.view = view
	var namespaces []string
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for i := range config.Destinations {
			if listens(&config.Destinations[i]) {
				namespaces = append(namespaces, namespace)
				break
			}
		}
	}
	if !slices.Equal(namespaces, s.namespaces) {
		s.namespaces, s.index = namespaces, nil // The next report is a full one.
	}
	for namespace, records := range s.records {
		config, _ := view.Namespace(namespace)
		sources, destinations := map[string]bool{}, map[string]*liveconfig.Destination{}
		for i := range config.Sources {
			sources[config.Sources[i].Name] = true
		}
		for i := range config.Destinations {
			destinations[config.Destinations[i].Name] = &config.Destinations[i]
		}
		for key, r := range records {
			kind, object, _ := strings.Cut(key, "/")
			name, endpoint, _ := strings.Cut(object, "/")
			var kept bool
			switch d := destinations[name]; {
			case kind == "disk":
				kept = true
			case kind == "discard": // Of a deleted object.
				kept = now.Sub(r.Time) < 2*liveconfig.ParkingTime
			case kind == "calls":
				kept = sources[name] || view.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionSources, Name: name})
			case d == nil && kind == "dead" && s.Store.DestinationStats(namespace+"/"+name).Ledger.DeadLettered > 0:
				kept = true // A new destination with this name continues the count.
			case d == nil:
				kept = view.Parked(namespace, liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: name})
			default: // A paused destination may have no endpoints in its config.
				kept = kind != "circuit" || d.State != liveconfig.Active ||
					slices.ContainsFunc(d.Endpoints, func(e liveconfig.Endpoint) bool { return e.Name == endpoint })
			}
			if !kept && s.Store.PutMeta(keyPrefix+namespace+"/"+key, nil) == nil {
				delete(records, key)
			}
		}
		if len(records) == 0 {
			delete(s.records, namespace)
		}
	}
}

// send appends the notices about facts that are due: those with the oldest records first, so that no
// fact that changes all the time keeps the others waiting.
func (s *Service) send(ctx context.Context, namespace string, due []fact, now time.Time) error {
	records := s.records[namespace]
	slices.SortStableFunc(due, func(a, b fact) int { return records[a.key].Time.Compare(records[b.key].Time) })
	sent := 0
	for _, f := range due {
		if f.event != "" {
			if sent++; sent > maxNotices {
				continue
			}
			if err := s.append(ctx, namespace, f, records[f.key], now); err != nil {
				return err
			}
		}
		if err := s.store(namespace, f, now); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) store(namespace string, f fact, now time.Time) error {
	r := record{f.value, now.UTC().Truncate(time.Millisecond)}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := s.Store.PutMeta(keyPrefix+namespace+"/"+f.key, text); err != nil {
		return err
	}
	s.remember(namespace, f.key, r)
	return nil
}

// append appends a notice to the queue.
func (s *Service) append(ctx context.Context, namespace string, f fact, before record, now time.Time) error {
	f.properties.Pod = s.Pod
	now = now.UTC().Truncate(time.Millisecond)
	// It is equal if a crash repeats the same notice, which is then a duplicate, and differs if the
	// fact has changed since, or is one of a new object with the same name.
	since := int64(0)
	if f.properties.Since != nil {
		since = f.properties.Since.UnixMilli()
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s %s %s %d %d", s.Pod, namespace, f.key, f.event, f.value, since, before.Time.UnixMilli()))
	m := message{
		Type: string(event.Track), Event: f.event, MessageID: fmt.Sprintf("notice-%x", sum[:16]), AnonymousID: "posthorn",
		Context: struct{}{}, Properties: f.properties, Timestamp: now, ReceivedAt: now, Version: 1,
	}
	var body bytes.Buffer
	e := json.NewEncoder(&body)
	e.SetEscapeHTML(false)
	if err := e.Encode(m); err != nil {
		return err
	}
	call := event.Call{Type: event.Track, MessageID: m.MessageID, Event: f.event, AnonymousID: m.AnonymousID, Timestamp: now,
		Body: bytes.TrimSpace(body.Bytes())}
	ref := liveconfig.SourceRef{Namespace: namespace, Source: liveconfig.Source{Name: liveconfig.SourceNotices}}
	routing := s.Gate.Begin()
	defer routing.End()
	message, _ := routing.Message(ref, ref.Key(), &call, now)
	_, err := routing.Append(ctx, []queue.Message{message})
	return err
}

// message is a notice as it is delivered.
type message struct {
	Type        string     `json:"type"`
	Event       string     `json:"event"`
	MessageID   string     `json:"messageId"`
	AnonymousID string     `json:"anonymousId"`
	Context     struct{}   `json:"context"`
	Properties  Properties `json:"properties"`
	Timestamp   time.Time  `json:"timestamp"`
	ReceivedAt  time.Time  `json:"receivedAt"`
	Version     int        `json:"version"`
}
