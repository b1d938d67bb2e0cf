// Command bench compares a dispatcher with a Go loop of signed keep-alive POSTs to the same
// sink, on the same machine, in the same run: `make bench`. Sink, loop and dispatcher are
// separate processes. Ratios apply to other machines too, absolute figures do not.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

var (
	seconds = flag.Float64("seconds", 4, "duration of each measurement")
	rounds  = flag.Int("rounds", 3, "number of measurements of each row; the median is printed")
	only    = flag.String("only", "", "run only the rows whose name contains this")
	parked  = flag.Int("parked", 1_000_000, "pending messages for the memory and restart rows")
	profile = flag.String("profile", "", "write the dispatcher's profiles of the last measurement to this directory: cpu, allocs and mutex; a standby's to its folder standby")
	binary  = flag.String("binary", "", "posthorn binary of the burst row; built from this tree when empty")
	limit   = flag.String("memory", "", "its --memory; the default when empty")
	asJSON  = flag.Bool("json", false, "print one JSON object per row instead of the table")
)

func main() {
	if role := os.Getenv("POSTHORN_BENCH_ROLE"); role != "" {
		if err := roles[role](os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		return
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// row is one line of the result.
type row struct {
	Name   string  `json:"name"`
	Value  string  `json:"value"`
	Goal   string  `json:"goal"`
	Met    bool    `json:"met"`
	Number float64 `json:"number"`
}

func run(ctx context.Context) error {
	b, err := newBench(ctx)
	if err != nil {
		return err
	}
	defer b.close()
	if !*asJSON {
		fmt.Println(machine())
		fmt.Printf("%-52s %28s   %-18s\n", "figure", "measured", "goal")
	}
	for _, m := range measurements {
		if !strings.Contains(m.name, *only) {
			continue
		}
		rows, err := medians(*rounds, func() ([]row, error) { return m.measure(ctx, b) })
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		for _, r := range rows {
			if *asJSON {
				line, _ := json.Marshal(r)
				fmt.Println(string(line))
				continue
			}
			mark := "met"
			if !r.Met {
				mark = "NOT MET"
			}
			if r.Goal == "" {
				mark = ""
			}
			fmt.Printf("%-52s %28s   %-18s %s\n", r.Name, r.Value, r.Goal, mark)
		}
	}
	return nil
}

// medians measures several times and returns the median of each row.
func medians(n int, measure func() ([]row, error)) ([]row, error) {
	var all [][]row
	for range max(1, n) {
		rows, err := measure()
		if err != nil {
			return nil, err
		}
		all = append(all, rows)
	}
	middle := make([]row, len(all[0]))
	for i := range middle {
		same := make([]row, len(all))
		for j := range all {
			same[j] = all[j][i]
		}
		slices.SortFunc(same, func(a, b row) int { return cmp.Compare(a.Number, b.Number) })
		middle[i] = same[len(same)/2]
	}
	return middle, nil
}

// machine describes the machine of the measurement.
func machine() string {
	model := "unknown processor"
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(text), "model name"); ok {
			line, _, _ := strings.Cut(rest, "\n")
			model = strings.TrimSpace(strings.TrimLeft(line, "\t :"))
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%d x %s, %s %s, %s; medians of %d, %.0f s each", runtime.NumCPU(), model, runtime.GOOS,
		strings.TrimSpace(string(kernel)), runtime.Version(), *rounds, *seconds)
}

var measurements = []struct {
	name    string
	measure func(context.Context, *bench) ([]row, error)
}{
	{"direct", measureDirect},
	{"batches", measureBatches},
	{"singles", measureSingles},
	{"numbers", measureNumbers},
	{"shapes", measureShapes},
	{"batches-out", measureBatchesOut},
	{"queue", measureQueue},
	{"latency", measureLatency},
	{"isolation", measureIsolation},
	{"calm", measureCalm},
	{"urls", measureURLs},
	{"slow", measureSlow},
	{"adaptive", measureAdaptive},
	{"attack", measureAttack},
	{"shares", measureShares},
	{"reach", measureReach},
	{"many", measureMany},
	{"fanout", measureFanout},
	{"ports", measurePorts},
	{"reuse", measureReuse},
	{"slopes", measureSlopes},
	{"locks", measureLocks},
	{"tails", measureTails},
	{"parked", measureParked},
	{"idle", measureIdle},
	{"burst", measureBurst},
	{"replicated", measureReplicated},
	{"takeover", measureTakeover},
	{"dark", measureDark},
	{"slots", measureSlots},
}

func (b *bench) window() time.Duration { return time.Duration(*seconds * float64(time.Second)) }

// cost prints the dispatcher's cost of a message.
func cost(s sample) row {
	return row{Name: "  per message: allocations, reads, writes, waits",
		Value: fmt.Sprintf("%.1f (%.0f B), %.1f, %.1f, %.2f", s.cost.allocations, s.cost.bytes, s.cost.reads, s.cost.writes, s.cost.waits),
		Met:   true, Number: s.cost.allocations}
}

// commits prints the messages per disk sync.
func commits(s sample) row {
	return row{Name: "  per commit", Value: s.commits, Met: true, Number: s.rate}
}

// split prints the CPU time of a message by process.
func split(s sample) row {
	return row{Name: "  CPU per message: dispatcher, senders, sink",
		Value: fmt.Sprintf("%.1f, %.1f, %.1f us; %.1f dials/1000", s.cpu, s.senders, s.sink, s.connections), Met: true, Number: s.cpu}
}

func atLeast(name string, value, goal float64, text string) row {
	return row{Name: name, Value: text, Goal: fmt.Sprintf(">= %.2f", goal), Met: value >= goal, Number: value}
}

func below(name string, value, goal float64, text, goalText string) row {
	return row{Name: name, Value: text, Goal: goalText, Met: value < goal, Number: value}
}

// measureDirect runs the direct loop, the base of the ratios.
func measureDirect(_ context.Context, b *bench) ([]row, error) {
	d, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	return []row{{Name: "direct: bare loop of signed POSTs", Value: fmt.Sprintf("%.0f/s, %.1f us CPU", d.rate, d.cpu), Met: true,
		Number: d.rate}}, nil
}

func measureBatches(ctx context.Context, b *bench) ([]row, error) {
	before, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	got, err := b.throughput(ctx, load{batch: 20, clients: 8}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	after, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	direct := before.mean(after)
	return []row{
		atLeast("delivered/s, batches of 20, of direct", got.rate/direct.rate, 0.70,
			fmt.Sprintf("%.2f (%.0f/s)", got.rate/direct.rate, got.rate)),
		below("CPU per delivered message, of direct's client", got.cpu/direct.cpu, 1.5,
			fmt.Sprintf("%.2f (%.1f us)", got.cpu/direct.cpu, got.cpu), "<= 1.5"),
		split(got), cost(got), commits(got),
	}, nil
}

func measureSingles(ctx context.Context, b *bench) ([]row, error) {
	direct, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	got, err := b.throughput(ctx, load{batch: 1, clients: 64}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	return []row{atLeast("delivered/s, single calls, of direct", got.rate/direct.rate, 0.40,
		fmt.Sprintf("%.2f (%.0f/s)", got.rate/direct.rate, got.rate)), split(got), cost(got), commits(got)}, nil
}

// measureNumbers compares messages with a long number, which becomes a string
// at delivery, with messages without one.
func measureNumbers(ctx context.Context, b *bench) ([]row, error) {
	l := load{batch: 20, clients: 8}
	long := l
	long.longNumbers = true
	plain, err := b.throughput(ctx, l, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	got, err := b.throughput(ctx, long, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	return []row{below("CPU per message with a long number, of one without", got.cpu/plain.cpu, 1.5,
		fmt.Sprintf("%.2f (%.1f us)", got.cpu/plain.cpu, got.cpu), "<= 1.5")}, nil
}

// measureShapes compares calls whose destination redacts values, or makes requests by an expression, with calls of one that does
// neither, as single calls and in batches.
func measureShapes(ctx context.Context, b *bench) (rows []row, err error) {
	const twelve = "{'id': call.messageId, 'user': call.userId, 'name': call.event, 'type': call.type, 'at': call.timestamp," +
		"?'total': call.?properties.?total, ?'items': call.?properties.?products, ?'coupon': call.?properties.?coupon, ?'ip': call.?context.?ip," +
		"?'agent': call.?context.?userAgent, 'source': source.name, 'to': destination.name}"
	redact := func(d *liveconfig.Destination) {
		d.Redact = &liveconfig.Redact{Drop: []string{"context.userAgent"}, Mask: []string{"properties.coupon"},
			Hash: &liveconfig.RedactHash{Key: liveconfig.NewSecret(secret), Paths: []liveconfig.HashedPath{{Path: "userId"}}}}
	}
	body := func(expression string) func(*liveconfig.Destination) {
		return func(d *liveconfig.Destination) { d.Request = &liveconfig.Request{Body: expression} }
	}
	for _, of := range []struct {
		name string
		load
		most [3]float64
	}{
		{"single calls", load{batch: 1, clients: 64}, [3]float64{1.3, 1.1, 1.5}},
		{"batches", load{batch: 20, clients: 8}, [3]float64{1.5, 1.3, 2.2}},
	} {
		plain, err := b.throughput(ctx, of.load, destinations(1, b.sink.Addr))
		if err != nil {
			return nil, err
		}
		for i, c := range []struct {
			name   string
			change func(*liveconfig.Destination)
		}{{"three redacted paths", redact}, {"the whole call as its body", body("call")}, {"a body of 12 fields", body(twelve)}} {
			list := destinations(1, b.sink.Addr)
			list[0].change = c.change
			got, err := b.throughput(ctx, of.load, list)
			if err != nil {
				return nil, err
			}
			rows = append(rows, below("CPU per message of "+of.name+", "+c.name+", of none", got.cpu/plain.cpu, of.most[i],
				fmt.Sprintf("%.2f (%.1f us)", got.cpu/plain.cpu, got.cpu), fmt.Sprintf("<= %.1f", of.most[i])))
		}
	}
	return rows, nil
}

// measureBatchesOut compares batches of 100 messages with a request for each: a backlog of calls in batches.
func measureBatchesOut(ctx context.Context, b *bench) (rows []row, err error) {
	l := load{batch: 20, clients: 8}
	direct, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	plain, err := b.throughput(ctx, l, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	for _, gzip := range []bool{false, true} {
		list, name := destinations(1, b.sink.Addr), "batches of 100"
		list[0].change = func(d *liveconfig.Destination) {
			d.Batch = &liveconfig.Batch{MaxMessages: 100, MaxBytes: 1 << 20, MaxDelayMS: 1000, Format: liveconfig.BatchNDJSON}
			d.Endpoints[0].GZip = gzip
		}
		if gzip {
			name += " with gzip"
		}
		got, err := b.throughput(ctx, l, list)
		if err != nil {
			return nil, err
		}
		rows = append(rows,
			below("CPU per message in "+name+", of single requests", got.cpu/plain.cpu, 0.7,
				fmt.Sprintf("%.2f (%.1f us of %.1f us)", got.cpu/plain.cpu, got.cpu, plain.cpu), "<= 0.7"),
			atLeast("delivered/s in "+name+", of direct single requests", got.rate/direct.rate, 2,
				fmt.Sprintf("%.2f (%.0f/s)", got.rate/direct.rate, got.rate)))
		if gzip {
			rows = append(rows, below("bytes of bodies in "+name+", of single requests", got.wire/plain.wire, 0.25,
				fmt.Sprintf("%.2f (%.0f of %.0f)", got.wire/plain.wire, got.wire, plain.wire), "<= 0.25"))
		}
	}
	return rows, nil
}

// measureQueue runs only the queue: durable appends of 20 messages, lease, ack.
func measureQueue(_ context.Context, b *bench) ([]row, error) {
	direct, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	dir := b.dir("queue")
	defer os.RemoveAll(dir) // The next round uses the same messageIds.
	got, err := b.loop("queue", dir, b.window().String())
	if err != nil {
		return nil, err
	}
	ratio := got.cpu / direct.cpu
	return []row{below("queue's CPU per message, of direct's client", ratio, 0.35,
		fmt.Sprintf("%.2f (%.1f us, %.0f/s)", ratio, got.cpu, got.rate), "<= 0.35")}, nil
}

// measureLatency sends at a quarter of the peak.
func measureLatency(ctx context.Context, b *bench) ([]row, error) {
	peak, err := b.throughput(ctx, load{batch: 20, clients: 8}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	got, err := b.throughput(ctx, load{batch: 20, clients: 8, perSecond: peak.rate / 4}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	return []row{
		below("sent to delivered at a quarter of peak, p50", got.p50.Seconds(), 0.005, got.p50.Round(10*time.Microsecond).String(), "< 5ms"),
		below("sent to delivered at a quarter of peak, p99", got.p99.Seconds(), 0.025, got.p99.Round(10*time.Microsecond).String(), "< 25ms"),
	}, nil
}

// measureIsolation compares 19 healthy destinations beside a healthy 20th one with
// the same 19 beside a failing one. The load is below saturation; only the 19 count.
func measureIsolation(ctx context.Context, b *bench) ([]row, error) {
	l := load{batch: 1, clients: 16}
	var healthy []sample
	for range 2 {
		got, err := b.throughput(ctx, l, destinations(20, b.sink.Addr))
		if err != nil {
			return nil, err
		}
		healthy = append(healthy, got)
	}
	base := healthy[0].mean(healthy[1])
	var rows []row
	for _, failing := range b.sink.failing() {
		d := destinations(20, b.sink.Addr)
		d[19].addr = failing.addr
		got, err := b.throughput(ctx, l, d)
		if err != nil {
			return nil, err
		}
		// The base counts 20 destinations.
		ratio := got.rate / (base.rate * 19 / 20)
		rows = append(rows, atLeast("19 healthy beside one failing ("+failing.name+"), of all healthy", ratio, 0.95, fmt.Sprintf("%.2f", ratio)))
	}
	return rows, nil
}

// measureCalm compares the latencies of 19 healthy destinations beside
// a healthy 20th one and beside a failing one, at a quarter of the peak. Each
// measurement with a failing one is between two without.
func measureCalm(ctx context.Context, b *bench) ([]row, error) {
	healthy := destinations(20, b.sink.Addr)
	peak, err := b.throughput(ctx, load{batch: 1, clients: 16}, healthy)
	if err != nil {
		return nil, err
	}
	l := load{batch: 1, clients: 16, perSecond: peak.rate / 20 / 4}
	before, err := b.throughput(ctx, l, healthy)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, failing := range b.sink.failing() {
		d := destinations(20, b.sink.Addr)
		d[19].addr = failing.addr
		got, err := b.throughput(ctx, l, d)
		if err != nil {
			return nil, err
		}
		after, err := b.throughput(ctx, l, healthy)
		if err != nil {
			return nil, err
		}
		base := before.mean(after)
		before = after
		ratio := got.p99.Seconds() / base.p99.Seconds()
		text := fmt.Sprintf("%.2f (p99 %v of %v, p50 %v of %v)", ratio, short(got.p99), short(base.p99), short(got.p50), short(base.p50))
		rows = append(rows, below("p99 of 19 healthy beside one failing ("+failing.name+"), of all healthy", ratio, 1.1, text, "< 1.10"))
	}
	return rows, nil
}

// measureURLs compares the deliveries to one URL alone with those beside a URL
// that answers after 200 ms and beside one that never answers. Each measurement
// is between two of the URL alone.
func measureURLs(ctx context.Context, b *bench) ([]row, error) {
	l := load{batch: 20, clients: 8}
	alone := destinations(1, b.sink.Addr)
	before, err := b.throughput(ctx, l, alone)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, second := range []struct{ name, addr string }{{"200 ms slow", b.sink.Delayed}, {"black hole", b.sink.BlackHole}} {
		d := destinations(1, b.sink.Addr)
		d[0].second = second.addr
		got, err := b.throughput(ctx, l, d)
		if err != nil {
			return nil, err
		}
		after, err := b.throughput(ctx, l, alone)
		if err != nil {
			return nil, err
		}
		ratio := got.rate / before.mean(after).rate
		before = after
		rows = append(rows, atLeast("delivered/s by a URL beside another ("+second.name+"), of alone", ratio, 0.9,
			fmt.Sprintf("%.2f (%.0f/s)", ratio, got.rate)))
	}
	return rows, nil
}

func short(d time.Duration) string { return fmt.Sprintf("%.2f ms", d.Seconds()*1000) }

// measureMany distributes the same load over 1,000 Sources with one destination each.
func measureMany(ctx context.Context, b *bench) ([]row, error) {
	one, err := b.throughput(ctx, load{batch: 20, clients: 8}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	d := destinations(1000, b.sink.Addr)
	for i := range d {
		d[i].source = i
	}
	many, err := b.throughput(ctx, load{batch: 20, clients: 8}, d)
	if err != nil {
		return nil, err
	}
	directOne, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	directMany, err := b.directLoop(1000)
	if err != nil {
		return nil, err
	}
	ratio, directRatio := many.rate/one.rate, directMany.rate/directOne.rate
	return []row{
		atLeast("delivered/s with 1,000 destinations, of 1", ratio, 0.8, fmt.Sprintf("%.2f (%.0f/s, %d MB)", ratio, many.rate, many.rss>>20)),
		split(one), split(many), cost(many),
		{Name: "  direct to 1,000 destinations, of direct to 1",
			Value: fmt.Sprintf("%.2f (%.0f/s, %.1f us CPU)", directRatio, directMany.rate, directMany.cpu), Met: true, Number: directRatio},
	}, nil
}

// measureFanout sends calls that have 200 destinations each, all at one host: with one Source, and
// with 50 Sources and 10,000 destinations.
func measureFanout(ctx context.Context, b *bench) ([]row, error) {
	const width = 200
	one, err := b.throughput(ctx, load{batch: 20, clients: 8}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, sources := range []int{1, 50} {
		d := destinations(sources*width, b.sink.Addr)
		for i := range d {
			d[i].source = i / width
		}
		got, err := b.throughput(ctx, load{batch: 20, clients: 8, ahead: 8000 / width}, d)
		if err != nil {
			return nil, err
		}
		ratio := got.rate / one.rate
		name := fmt.Sprintf("delivered/s to %d destinations at a host, %d per call, of 1", len(d), width)
		rows = append(rows, atLeast(name, ratio, 0.7, fmt.Sprintf("%.2f (%.0f/s, %d MB)", ratio, got.rate, got.rss>>20)), split(got), cost(got))
	}
	return rows, nil
}

// measurePorts sends calls that have 200 destinations each, with 50 Sources and 10,000 destinations, each at a
// port of its own, and compares it with the direct loop to the same ports, before and after.
func measurePorts(ctx context.Context, b *bench) ([]row, error) {
	const sources, width = 50, 200
	sink, err := startSink(ctx, sources*width)
	if err != nil {
		return nil, err
	}
	defer sink.stop()
	b = &bench{root: b.root, sink: sink}
	d := make([]destination, sources*width)
	for i := range d {
		d[i] = destination{addr: sink.Ports[i], source: i / width}
	}
	before, err := b.directLoopTo(sink.Ports)
	if err != nil {
		return nil, err
	}
	got, err := b.throughput(ctx, load{batch: 20, clients: 8, ahead: 8000 / width}, d)
	if err != nil {
		return nil, err
	}
	after, err := b.directLoopTo(sink.Ports)
	if err != nil {
		return nil, err
	}
	direct := before.mean(after)
	ratio := got.rate / direct.rate
	return []row{
		atLeast("delivered/s to 10000 ports, 200 per call, of direct to them", ratio, 0.9,
			fmt.Sprintf("%.2f (%.0f of %.0f/s, %d MB)", ratio, got.rate, direct.rate, got.rss>>20)),
		split(got), cost(got),
	}, nil
}

// measureParked measures memory and restart with a backlog for a suspended destination.
func measureParked(ctx context.Context, b *bench) ([]row, error) {
	d := destinations(1, b.sink.Addr)
	d[0].suspended = true
	defer os.RemoveAll(b.dir("parked"))
	defer os.RemoveAll(b.dir("parked-none"))
	p, err := b.start(ctx, d, b.dir("parked"))
	if err != nil {
		return nil, err
	}
	empty := destinations(0, "")
	if _, err := b.fill(p, *parked); err != nil {
		return nil, err
	}
	rss := p.rss()
	p.stop()
	begin := time.Now()
	p, err = b.start(ctx, d, b.dir("parked"))
	if err != nil {
		return nil, err
	}
	restart := time.Since(begin)
	p.stop()
	base, err := b.start(ctx, empty, b.dir("parked-none"))
	if err != nil {
		return nil, err
	}
	if _, err := b.fill(base, *parked); err != nil {
		return nil, err
	}
	baseRSS := base.rss()
	base.stop()
	ratio := float64(rss) / float64(baseRSS)
	name := fmt.Sprintf("%d pending messages", *parked)
	return []row{
		below("resident memory with "+name, float64(rss), 200<<20, fmt.Sprintf("%d MB", rss>>20), "< 200 MB"),
		below("resident memory with "+name+", of none pending", ratio, 1.2, fmt.Sprintf("%.2f (%d MB)", ratio, baseRSS>>20), "<= 1.2"),
		below("restart with "+name, restart.Seconds(), 2, restart.Round(time.Millisecond).String(), "< 2s"),
	}, nil
}

func measureIdle(ctx context.Context, b *bench) ([]row, error) {
	p, err := b.start(ctx, destinations(20, b.sink.Addr), b.dir("idle"))
	if err != nil {
		return nil, err
	}
	defer p.stop()
	time.Sleep(2 * time.Second)
	before, begin := p.cpu(), time.Now()
	time.Sleep(b.window())
	share := 100 * (p.cpu() - before).Seconds() / time.Since(begin).Seconds()
	rss := p.rss()
	return []row{
		below("idle CPU, of one core", share, 0.5, fmt.Sprintf("%.2f %%", share), "< 0.5 %"),
		below("idle memory", float64(rss), 60<<20, fmt.Sprintf("%d MB", rss>>20), "< 60 MB"),
	}, nil
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func sortDurations(d []time.Duration) { sort.Slice(d, func(i, j int) bool { return d[i] < d[j] }) }
