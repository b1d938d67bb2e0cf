package page

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/observed"
)

// key names an object.
type key struct{ Namespace, Name string }

func (k key) String() string { return k.Namespace + "/" + k.Name }

// state is what the page read last.
type state struct {
	view
	answers map[string]*answer // by pod
	// objectsAt is when the objects were read. They are read only for a view.
	objectsAt time.Time
}

// view is the data of one moment; it is immutable.
type view struct {
	now time.Time
	// indices are the states of the stores: by pod, or by slot for processes of a replicated log.
	indices map[string]*podreport.Index
	pods    int
	silent  map[string]error // pods that did not answer
	unowned []int            // slots that no pod owns, sorted
	missing error            // why other pods are not connected
	only    string           // the namespace that is shown; "" is all

	sources      map[string][]v1beta1.Source
	destinations map[key]*v1beta1.WebhookDestination
	audiences    []v1beta1.Audience
	deletions    []v1beta1.DeletionRequest
	problems     []manifest.Problem
	unknownKeys  []adminapi.UnknownKey
}

// freshness is how old data may be, so that many readers cost no more than one.
const freshness = time.Second

// collect returns data that are at most freshness old.
func (p *Page) collect(ctx context.Context) (view, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.live.now) >= freshness {
		p.readReports(ctx)
	}
	if time.Since(p.live.objectsAt) >= p.options.ObjectsAge {
		if err := p.readObjects(ctx); err != nil {
			return view{}, err
		}
	}
	if len(p.live.indices) == 0 {
		return view{}, fmt.Errorf("no dispatcher answers: %w", cmp.Or(errors.Join(append(slices.Collect(maps.Values(p.live.silent)), p.live.missing)...), errors.New("none is running")))
	}
	return p.live.view, nil
}

// podTimeout bounds the wait for one dispatcher.
const podTimeout = 5 * time.Second

// dispatchers returns the admin APIs of the stores, by the names of view.indices, and the reason why
// others are missing.
func (p *Page) dispatchers() (map[string]*adminapi.Client, error) {
	all, missing := p.options.Dispatchers()
	owned := p.owned.Load()
	if owned == nil || len(*owned) == 0 {
		return all, missing
	}
	stores := map[string]*adminapi.Client{}
	for pod, client := range all {
		slots, shared := (*owned)[pod]
		if !shared {
			stores[pod] = client
		}
		for _, slot := range slots {
			stores[slotName(slot)] = client.Slot(slot)
		}
	}
	return stores, missing
}

func slotName(slot int) string { return fmt.Sprintf("slot %d", slot) }

// answer is what a dispatcher reported.
type answer struct {
	index *podreport.Index
	slots map[int]*podreport.Index // of a process of a replicated log
	err   error
}

// read requests what changed; an error keeps the last state.
func (a *answer) read(ctx context.Context, client *adminapi.Client) {
	var changes podreport.Changes
	if changes, a.err = podreport.Fetch(ctx, client, a.index, a.slots); a.err != nil {
		return
	}
	if changes.Report != nil {
		a.index, _ = a.index.Merge(*changes.Report, nil)
	}
	slots := map[int]*podreport.Index{}
	for slot, report := range changes.Slots {
		slots[slot] = a.slots[slot]
		if report != nil {
			slots[slot], _ = slots[slot].Merge(*report, nil)
		}
	}
	a.slots = slots
}

// readReports merges what changed in every dispatcher; a silent one keeps its last state.
func (p *Page) readReports(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, podTimeout)
	defer cancel()
	answers := map[string]*answer{}
	var group sync.WaitGroup
	dispatchers, missing := p.options.Dispatchers()
	for pod, client := range dispatchers {
		a := &answer{}
		if last := p.live.answers[pod]; last != nil {
			*a = *last
		}
		answers[pod] = a
		group.Go(func() { a.read(ctx, client) })
	}
	group.Wait()
	indices, silent := map[string]*podreport.Index{}, map[string]error{}
	owned, owners, number := map[string][]int{}, map[int]string{}, 0
	for pod, a := range answers {
		switch {
		case a.index == nil:
		case !a.index.Replication.HasSlots():
			indices[pod] = a.index
		default:
			owned[pod], number = nil, max(number, a.index.Replication.Number)
			for slot, x := range a.slots {
				// A silent process may have lost the slot to another one.
				if other := indices[slotName(slot)]; other == nil || other.Replication.Epoch < x.Replication.Epoch {
					indices[slotName(slot)], owners[slot] = x, pod
				}
			}
		}
		if a.err != nil {
			silent[pod] = a.err
		}
	}
	p.live.unowned = nil
	for slot := range number {
		if pod, ok := owners[slot]; ok {
			owned[pod] = append(owned[pod], slot)
		} else {
			p.live.unowned = append(p.live.unowned, slot)
		}
	}
	p.owned.Store(&owned)
	p.live.answers, p.live.indices, p.live.silent, p.live.missing, p.live.now = answers, indices, silent, missing, time.Now()
	p.live.pods, p.live.only = len(answers), p.options.Namespace
}

func (p *Page) readObjects(ctx context.Context) error {
	prefix := "/apis/" + v1beta1.GroupVersion.String()
	if p.options.Namespace != "" {
		prefix += "/namespaces/" + url.PathEscape(p.options.Namespace)
	}
	var sources v1beta1.SourceList
	var destinations v1beta1.WebhookDestinationList
	var audiences v1beta1.AudienceList
	var deletions v1beta1.DeletionRequestList
	var problems manifest.Problems
	paths := map[string]any{prefix + "/sources": &sources, prefix + "/webhookdestinations": &destinations, prefix + "/audiences": &audiences,
		prefix + "/deletionrequests": &deletions}
	if p.options.Standalone {
		paths["/problems"] = &problems
	}
	for path, into := range paths {
		if err := read(ctx, p.options.Objects, path, into); err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
	}
	l := &p.live
	l.sources, l.destinations = map[string][]v1beta1.Source{}, map[key]*v1beta1.WebhookDestination{}
	for _, s := range sources.Items {
		l.sources[s.Namespace] = append(l.sources[s.Namespace], s)
	}
	for i := range destinations.Items {
		d := &destinations.Items[i]
		l.destinations[key{d.Namespace, d.Name}] = d
	}
	l.audiences, l.deletions, l.problems, l.unknownKeys = audiences.Items, deletions.Items, problems.Problems, nil
	dispatchers, _ := p.dispatchers()
	for _, client := range dispatchers {
		for k, err := range client.UnknownKeys(ctx) {
			if err != nil {
				break
			}
			l.unknownKeys = append(l.unknownKeys, k)
		}
	}
	l.objectsAt = time.Now()
	return nil
}

func read(ctx context.Context, client *adminapi.Client, path string, into any) error {
	resp, err := client.Get(ctx, path, "application/json")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(into)
}

// numbers are the sums of a destination's reports.
type numbers struct {
	adminapi.Ledger
	Stored, Retrying          int64
	Oldest, Next, LastSuccess time.Time
	Open                      bool
}

func (v *view) numbers(k key) (sum numbers) {
	var d adminapi.DestinationReport
	for _, x := range v.indices {
		if x.Namespace(k.Namespace).ReadDestination(k.Name, &d) {
			sum.add(&d)
		}
	}
	return sum
}

func (sum *numbers) add(d *adminapi.DestinationReport) {
	sum.Ledger = plus(sum.Ledger, d.Ledger)
	sum.Stored += d.DeadLettersStored
	sum.Retrying += d.Retrying
	sum.Oldest, sum.Next = observed.Earlier(sum.Oldest, d.OldestPending), observed.Earlier(sum.Next, d.NextAttempt)
	for _, e := range d.Endpoints {
		sum.Open = sum.Open || e.State.Open()
		sum.LastSuccess = observed.Later(sum.LastSuccess, e.LastSuccess)
	}
}

func plus(a, b adminapi.Ledger) adminapi.Ledger {
	return adminapi.Ledger{
		Accepted: a.Accepted + b.Accepted, Delivered: a.Delivered + b.Delivered, Filtered: a.Filtered + b.Filtered,
		Omitted:      a.Omitted + b.Omitted,
		DeadLettered: a.DeadLettered + b.DeadLettered, Discarded: a.Discarded + b.Discarded, Pending: a.Pending + b.Pending,
	}
}

// attempts returns the last attempts of the dispatchers at a destination, newest first. The error
// names the dispatchers whose attempts are missing.
func (p *Page) attempts(ctx context.Context, k key) (list []adminapi.Attempt, err error) {
	dispatchers, _ := p.dispatchers()
	for _, pod := range slices.Sorted(maps.Keys(dispatchers)) {
		for a, e := range dispatchers[pod].Attempts(ctx, k.String(), "") {
			if e != nil {
				err = errors.Join(err, fmt.Errorf("attempts of dispatcher %s: %w", pod, e))
				break
			}
			list = append(list, a)
		}
	}
	slices.SortStableFunc(list, func(a, b adminapi.Attempt) int { return b.Time.Compare(a.Time) })
	return list, err
}

// namespaces are the reports of a dispatcher about the namespaces that are shown.
func (v *view) namespaces(x *podreport.Index) iter.Seq2[string, *podreport.NamespaceIndex] {
	return func(yield func(string, *podreport.NamespaceIndex) bool) {
		for name, n := range x.Namespaces() {
			if (v.only == "" || v.only == name) && !yield(name, n) {
				return
			}
		}
	}
}

func compareKeys(a, b key) int { return strings.Compare(a.String(), b.String()) }
