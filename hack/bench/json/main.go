// Command json compares package event, which decodes, validates, normalises and canonicalises
// a call's bytes, with JSON libraries that only decode the same bytes, in one run.
//
//	GOWORK=off go run . [-time 50ms -rounds 5]
//
// The decoders run in turn, and the figures are medians over the rounds, so
// that other load affects all of them. Ratios are comparable within one run; times are not
// comparable between machines.
package main

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/bytedance/sonic"
	json2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/goccy/go-json"
	"github.com/valyala/fastjson"

	"github.com/posthorn/posthorn/analytics/event"
)

var (
	slice  = flag.Duration("time", 50*time.Millisecond, "duration of a decoder's run in each round")
	rounds = flag.Int("rounds", 5, "number of runs of each decoder")
)

// sample is a request as clients send it.
type sample struct {
	name  string
	typ   event.Type // "" for a batch
	calls int
	body  []byte
}

// samples has calls of about 1 KB, with the context that browser and mobile
// clients send, and a batch of 20 such calls.
func samples() []sample {
	const common = `"anonymousId":"507f191e810c19729de860ea","userId":"97980cfea0067","messageId":"022bb90c-bbac-11e4-8dfc-aa07a5b093db",` +
		`"timestamp":"2026-05-04T11:59:58.400Z","sentAt":"2026-05-04T11:59:59.900Z","integrations":{"All":true},` +
		`"context":{"app":{"name":"InitechGlobal","version":"545","build":"3.0.1.545"},"campaign":{"name":"TPS Innovation Newsletter","source":"Newsletter","medium":"email"},` +
		`"device":{"id":"B5372DB0-C21E-11E4-8DFC-AA07A5B093DB","manufacturer":"Apple","model":"iPhone7,2","type":"ios"},"ip":"8.8.8.8","library":{"name":"analytics.js","version":"2.11.1"},` +
		`"locale":"en-US","network":{"carrier":"T-Mobile US","cellular":true,"wifi":false},"os":{"name":"iPhone OS","version":"8.1.3"},` +
		`"page":{"path":"/academy/","referrer":"","search":"","title":"Analytics Academy","url":"https://shop.example/academy/"},"timezone":"Europe/Amsterdam"}`
	calls := []sample{
		{typ: event.Identify, body: []byte(`"traits":{"name":"Peter Gibbons","email":"peter@example.com","plan":"premium","logins":5,"balance":12.5}`)},
		{typ: event.Track, body: []byte(`"event":"Order Completed","properties":{"order_id":"50314b8e9bcf000000000000","total":27.5,"currency":"USD",` +
			`"products":[{"product_id":"507f1f77bcf86cd799439011","sku":"45790-32","price":19,"quantity":1}]}`)},
		{typ: event.Page, body: []byte(`"name":"Home","properties":{"path":"/","referrer":"https://search.example/","title":"Home","url":"https://shop.example/"}`)},
		{typ: event.Screen, body: []byte(`"name":"Settings","properties":{"variation":"blue signup button"}`)},
		{typ: event.Group, body: []byte(`"groupId":"0e8c78ea9d97a7b8185e8632","traits":{"name":"Initech","industry":"Technology","employees":329,"plan":"enterprise"}`)},
		{typ: event.Alias, body: []byte(`"previousId":"507f191e81"`)},
	}
	batch := []byte(`{"batch":[`)
	for i := range calls {
		c := &calls[i]
		c.name, c.calls = string(c.typ), 1
		c.body = fmt.Appendf(nil, `{"type":%q,%s,%s}`, c.typ, c.body, common)
	}
	for i := range 20 {
		batch = append(append(batch, calls[i%len(calls)].body...), ',')
	}
	batch = append(batch[:len(batch)-1], `],"sentAt":"2026-05-04T11:59:59.900Z"}`...)
	return append(calls, sample{name: "batch", calls: 20, body: batch})
}

// contestant decodes once for each call of run.
type contestant struct {
	name string
	run  func(s sample) error
}

func contestants() []contestant {
	var pool fastjson.ParserPool
	var written []byte
	received := time.Now()
	return []contestant{
		{"event.Parse", func(s sample) error {
			batch, err := event.Request{Type: s.typ, ReceivedAt: received}.Parse(s.body)
			if err == nil && len(batch.Calls) != s.calls {
				err = errors.New("calls are missing")
			}
			return err
		}},
		{"encoding/json", func(s sample) error {
			var v map[string]any
			return stdjson.Unmarshal(s.body, &v)
		}},
		{"json v2", func(s sample) error {
			var v map[string]any
			return json2.Unmarshal(s.body, &v)
		}},
		{"jsontext tokens", func(s sample) error {
			d := jsontext.NewDecoder(bytes.NewReader(s.body))
			for {
				if _, err := d.ReadToken(); err == io.EOF {
					return nil
				} else if err != nil {
					return err
				}
			}
		}},
		{"goccy/go-json", func(s sample) error {
			var v map[string]any
			return json.Unmarshal(s.body, &v)
		}},
		{"sonic", func(s sample) error {
			var v map[string]any
			return sonic.Unmarshal(s.body, &v)
		}},
		{"sonic, no copies", func(s sample) error {
			var v map[string]any
			return sonic.ConfigFastest.Unmarshal(s.body, &v)
		}},
		{"fastjson, pooled", func(s sample) error {
			p := pool.Get()
			_, err := p.ParseBytes(s.body)
			pool.Put(p)
			return err
		}},
		// It decodes lazily: strings and numbers are located but not decoded. Delivery
		// needs bytes, so this is the minimal use.
		{"fastjson, and written", func(s sample) error {
			p := pool.Get()
			v, err := p.ParseBytes(s.body)
			if err == nil {
				written = v.MarshalTo(written[:0])
			}
			pool.Put(p)
			return err
		}},
	}
}

// figures has the figures per call, also for a batch.
type figures struct{ ns, allocs, bytes float64 }

// measure runs a contestant for about one slice.
func measure(c contestant, s sample) (figures, error) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	n, start := 0, time.Now()
	for time.Since(start) < *slice {
		for range 64 / s.calls { // The cost of reading the clock is negligible.
			if err := c.run(s); err != nil {
				return figures{}, fmt.Errorf("%s, %s: %w", c.name, s.name, err)
			}
			n += s.calls
		}
	}
	elapsed := time.Since(start)
	runtime.ReadMemStats(&after)
	return figures{
		ns:     float64(elapsed) / float64(n),
		allocs: float64(after.Mallocs-before.Mallocs) / float64(n),
		bytes:  float64(after.TotalAlloc-before.TotalAlloc) / float64(n),
	}, nil
}

func median(all []figures, of func(figures) float64) float64 {
	values := make([]float64, len(all))
	for i, f := range all {
		values[i] = of(f)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

func main() {
	flag.Parse()
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	requests, libraries := samples(), contestants()
	medians := make([][]figures, len(requests)) // by sample, then contestant
	for i, s := range requests {
		all := make([][]figures, len(libraries))
		for round := range *rounds + 1 {
			for j, c := range libraries {
				f, err := measure(c, s)
				if err != nil {
					return err
				}
				if round > 0 { // The first round fills caches and pools.
					all[j] = append(all[j], f)
				}
			}
		}
		for _, f := range all {
			medians[i] = append(medians[i], figures{
				ns:     median(f, func(f figures) float64 { return f.ns }),
				allocs: median(f, func(f figures) float64 { return f.allocs }),
				bytes:  median(f, func(f figures) float64 { return f.bytes }),
			})
		}
	}

	fmt.Fprintf(out, "Package event compared with decoding alone: ns per call, median of %d rounds\n\n", *rounds)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header, sizes := "\t", "bytes\t"
	for _, s := range requests {
		header += s.name + "\t"
		sizes += fmt.Sprintf("%d\t", len(s.body))
	}
	fmt.Fprintf(w, "%sallocs\tB\ttime / event.Parse\t\n%s\t\t\t\n", header, sizes)
	for j, c := range libraries {
		row, ratio := c.name+"\t", 1.0
		for i := range requests {
			row += fmt.Sprintf("%.0f\t", medians[i][j].ns)
			ratio *= medians[i][j].ns / medians[i][0].ns
		}
		last := medians[len(requests)-1][j]
		ratio = math.Pow(ratio, 1/float64(len(requests)))
		fmt.Fprintf(w, "%s%.1f\t%.0f\t%.2f\t\n", row, last.allocs, last.bytes, ratio)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, strings.Join([]string{"",
		"batch is a request of 20 calls; allocs and B are per call of it. The last column is the",
		"geometric mean over the samples: above 1, decoding alone takes longer than",
		"event.Parse."}, "\n"))
	return err
}
