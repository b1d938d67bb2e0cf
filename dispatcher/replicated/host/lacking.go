package host

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	// lackingDelay is how long a standby may lack an object of the log before it is not ready: the manifests of
	// several machines do not change at the same time.
	lackingDelay = time.Minute
	// namedLacks bounds the names in a reason.
	namedLacks = 5
)

// lackedSince has the objects that a process lacks, each with the time since when.
type lackedSince map[string]time.Time

// compare takes the objects that the process lacks now.
func (l lackedSince) compare(now time.Time, objects []string) {
	maps.DeleteFunc(l, func(object string, _ time.Time) bool { return !slices.Contains(objects, object) })
	for _, object := range objects {
		if _, ok := l[object]; !ok {
			l[object] = now
		}
	}
}

// problem names the objects that the process has lacked for lackingDelay, with the fix; empty for none.
func (l lackedSince) problem(now time.Time) string {
	var names []string
	for _, object := range slices.Sorted(maps.Keys(l)) {
		if now.Sub(l[object]) >= lackingDelay {
			names = append(names, object)
		}
	}
	if len(names) == 0 {
		return ""
	}
	more := ""
	if n := len(names) - namedLacks; n > 0 {
		names, more = names[:namedLacks], " and "+plural.Count(n, "more object")
	}
	return fmt.Sprintf("the manifests of this standby lack what the log has, or have an older version: %s%s; copy the manifests of the owner. If this process becomes the owner, it parks these objects", strings.Join(names, ", "), more)
}

// lacking compares the objects of the only slot with the objects of this process while it is a standby. One that lacks
// an object, or has not compared them yet, leaves the slot to a standby that has all. A nil lacking finds nothing.
type lacking struct {
	find    func(values map[string][]byte) []string
	members *slots.Members
	log     *slog.Logger
	// values has the log's objects that are compared next.
	values chan map[string][]byte

	mu       sync.Mutex
	compared bool
	since    lackedSince
	reported bool
}

// newLacking returns nil if there is nothing to compare.
func newLacking(o Options, members *slots.Members) *lacking {
	if o.Lacks == nil {
		return nil
	}
	return &lacking{find: o.Lacks, members: members, log: o.Logger, values: make(chan map[string][]byte, 1), since: lackedSince{}}
}

// run compares until ctx is done. It is a goroutine of its own, because the file system may not answer.
func (l *lacking) run(ctx context.Context) {
	for {
		select {
		case values := <-l.values:
			l.take(time.Now(), l.find(values))
		case <-ctx.Done():
			return
		}
	}
}

// offer is Options.Values of package slots: it makes run compare the values, unless it still compares others.
func (l *lacking) offer(values map[string][]byte) {
	select {
	case l.values <- values:
	default:
	}
}

// restart forgets the result: an ownership has begun or ended, in which the objects may change.
func (l *lacking) restart() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.compared, l.since = false, lackedSince{}
}

func (l *lacking) take(now time.Time, objects []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.compared = true
	l.since.compare(now, objects)
	switch problem := l.since.problem(now); {
	case problem != "" && !l.reported:
		l.log.Error("this standby lacks objects of the log", "problem", problem)
		l.reported = true
	case problem == "" && l.reported:
		l.log.Info("this standby has all objects of the log again")
		l.reported = false
	}
}

// problem is why the standby is not ready; empty if it is.
func (l *lacking) problem() string {
	if l == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.since.problem(time.Now())
}

// isComplete reports whether this process has all objects of the log.
func (l *lacking) isComplete() bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.compared && len(l.since) == 0
}

// mayClaim reports whether this process may claim the slot: it has all objects, no other standby has them and a
// complete copy, or none has claimed the slot for slots.TakeTurn.
func (l *lacking) mayClaim() bool {
	if l.isComplete() {
		return true
	}
	_, placed := l.members.View(1)
	return placed[0].Unowned >= slots.TakeTurn || !slices.ContainsFunc(l.members.Successors(0), func(m slots.Member) bool {
		return !m.OldConfig
	})
}

// metric returns the metric of a standby.
func (l *lacking) metric() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "posthorn_replication_lacking_objects", Help: "Objects of the log that the manifests of this standby of posthorn run lack, or have in an older version.",
	}, func() float64 {
		if l == nil {
			return 0
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		return float64(len(l.since))
	})
}
