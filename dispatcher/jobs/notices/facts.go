package notices

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
)

// The events of notices.
const (
	CircuitOpened     = "Circuit Opened"
	CircuitClosed     = "Circuit Closed"
	DeadLetters       = "Dead Letters"
	RetryWindowEnding = "Retry Window Ending"
	DiskNearlyFull    = "Disk Nearly Full"
	DiscardAhead      = "Discard Ahead"
	NoTraffic         = "No Traffic"
)

const (
	// circuitPause is the shortest time between two notices about the circuit of an endpoint,
	// repeatPause that between two notices about dead letters or the retry window of a destination.
	circuitPause = 5 * time.Minute
	repeatPause  = time.Hour
	// The oldest message has used this share of its retry window, in percent, and the disk this
	// share of the space up to the high-water mark. The disk is not nearly full again below the
	// third share.
	windowPercent, diskPercent, diskEndPercent = 75, 90, 85
	// silence is how long there are no calls before a notice: longer than a night. trafficPause bounds
	// the writes of the records while there are calls, and is the time after the start in which a pod
	// waits for the calls that others got while it was down.
	silence, trafficPause = 24 * time.Hour, time.Hour
)

// Properties are the properties of a notice. Those that do not belong to its event are empty.
type Properties struct {
	// Pod is the dispatcher that observed the fact.
	Pod         string `json:"pod"`
	Destination string `json:"destination,omitempty"`
	Endpoint    string `json:"endpoint,omitempty"`
	Source      string `json:"source,omitempty"`
	// Since is when the fact began, Until when it has its effect.
	Since *time.Time `json:"since,omitempty"`
	Until *time.Time `json:"until,omitempty"`
	// Reason and Message describe the last failure.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Messages counts messages, dead letters or excluded calls.
	Messages int64 `json:"messages,omitempty"`
	// UsedPercent is the used share of the disk.
	UsedPercent int64 `json:"usedPercent,omitempty"`
}

// fact is an observation. Its key identifies it in its namespace; its value changes with each change
// that a notice reports.
type fact struct {
	key, value string
	// event is empty for a change that ends a fact without a notice.
	event      string
	properties Properties
	pause      time.Duration
}

// none is the value of a fact before its first notice and after its end.
const none = ""

// due reports whether a fact differs from its record, after its pause.
func (f fact) due(before record, now time.Time) bool {
	return f.value != before.Value && now.Sub(before.Time).Abs() >= f.pause
}

// facts returns the facts of a namespace that are due. Destinations that get notices have none, also as
// forwarded dead letters, so that no notice causes another one.
func facts(config liveconfig.Config, n *podreport.NamespaceIndex, c adminapi.ConfigReport, before map[string]record,
	now time.Time) (list []fact) {
	if n == nil {
		n = &podreport.NamespaceIndex{}
	}
	addFact := func(f fact) {
		if f.due(before[f.key], now) {
			list = append(list, f)
		}
	}
	add := func(key, value, event string, pause time.Duration, p Properties) {
		addFact(fact{key, value, event, p, pause})
	}
	for i := range config.Sources {
		if r := n.Sources[config.Sources[i].Name]; r != nil {
			key := "calls/" + r.Name
			last := before[key]
			if config.Sources[i].Suspended {
				last = record{} // The observation begins again when it is resumed.
			}
			addFact(traffic(key, r.Accepted, 0, last, now, Properties{Source: r.Name}))
		}
	}
	gets := map[string]bool{}
	for i := range config.Destinations {
		if d := &config.Destinations[i]; listens(d) {
			gets[d.Name] = true
			if to := d.DeadLetters.ForwardTo; to != "" { // It gets the notices that fail.
				gets[to] = true
			}
		}
	}
	var r adminapi.DestinationReport
	for i := range config.Destinations {
		d := &config.Destinations[i]
		if gets[d.Name] || !n.ReadDestination(d.Name, &r) {
			continue
		}
		for i := range r.Endpoints {
			e := &r.Endpoints[i]
			p := Properties{Destination: d.Name, Endpoint: e.Name, Since: at(e.Since)}
			if f := e.LastFailure; f != nil && e.State.Open() {
				p.Reason, p.Message = f.Reason, f.Message
			}
			value, event := none, CircuitClosed
			if e.State.Open() {
				value, event = "open", CircuitOpened
			}
			add("circuit/"+d.Name+"/"+e.Name, value, event, circuitPause, p)
		}
		key := "dead/" + d.Name
		reported, _ := strconv.ParseInt(before[key].Value, 10, 64) // 0 before the first notice.
		if reported > r.DeadLettered {
			reported = 0 // The count began again, for a new destination with this name.
		}
		if r.DeadLettered > reported {
			add(key, strconv.FormatInt(r.DeadLettered, 10), DeadLetters, repeatPause,
				Properties{Destination: d.Name, Messages: r.DeadLettered - reported})
		}
		window := d.Delivery.RetryWindow()
		key = "window/" + d.Name
		if ends := r.OldestExpires; !ends.IsZero() && ends.Sub(now) <= window*(100-windowPercent)/100 {
			add(key, "ending", RetryWindowEnding, repeatPause,
				Properties{Destination: d.Name, Since: at(r.OldestPending), Until: at(ends), Messages: r.Pending})
		} else {
			add(key, none, "", 0, Properties{})
		}
		key = "messages/" + d.Name
		addFact(traffic(key, r.Accepted-r.Filtered-r.Omitted, r.Filtered+r.Omitted, before[key], now, Properties{Destination: d.Name}))
	}
	for _, d := range c.Discards {
		if d.Messages > 0 && !gets[d.Destination] && d.Source != liveconfig.SourceNotices {
			add("discard/"+d.Destination+"/"+d.Source, d.At.UTC().Format(time.RFC3339), DiscardAhead, 0,
				Properties{Destination: d.Destination, Source: d.Source, Until: at(d.At), Messages: d.Messages})
		}
	}
	return list
}

// traffic returns the fact about the calls that a Source accepts, or that a destination gets and its
// filter excludes. The value has both numbers, and ends with a mark after a notice and before the first
// call that the pod observes. A destination without calls to exclude has a silent Source, which has
// a notice of its own.
func traffic(key string, calls, excluded int64, before record, now time.Time, p Properties) fact {
	const silent = " silent"
	last, wasSilent := strings.CutSuffix(before.Value, silent)
	lastCalls, lastExcluded, observed := strings.Cut(last, " ")
	switch {
	case !observed:
		return fact{key: key, value: fmt.Sprint(calls, excluded) + silent}
	case lastCalls != strconv.FormatInt(calls, 10):
		return fact{key: key, value: fmt.Sprint(calls, excluded), pause: trafficPause}
	case !wasSilent && now.Sub(before.Time) >= silence && (p.Source != "" || lastExcluded != strconv.FormatInt(excluded, 10)):
		reported, _ := strconv.ParseInt(lastExcluded, 10, 64)
		p.Since, p.Messages = at(before.Time), excluded-reported
		return fact{key: key, value: before.Value + silent, event: NoTraffic, properties: p}
	}
	return fact{key: key, value: before.Value}
}

// disk returns the fact about the pod's disk, for the namespace of the release. left are the bytes
// until the high-water mark, which is a share of total.
func disk(left, total, highWater float64, before map[string]record) fact {
	f := fact{key: "disk", value: before["disk"].Value}
	mark := highWater * total
	switch level := 100 * (mark - left) / mark; {
	case level >= diskPercent:
		f.value, f.event, f.properties = "full", DiskNearlyFull, Properties{UsedPercent: int64(100 * (mark - left) / total)}
	case level < diskEndPercent:
		f.value = none
	}
	return f
}

// listens reports whether a destination gets notices.
func listens(d *liveconfig.Destination) bool {
	return slices.Contains(d.Sources, liveconfig.SourceNotices)
}

// at returns a time for Properties; nil for the zero time.
func at(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC().Truncate(time.Millisecond)
	return &t
}
