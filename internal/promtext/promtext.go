// Package promtext writes metrics in Prometheus' text format (version 0.0.4) while they are
// collected. A registry of client_golang builds and sorts every series in memory first; for the
// series of ten thousand destinations that costs more than the rest of an idle dispatcher. The
// package does not know what is measured. The main types are Writer and Handler.
package promtext

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
)

// Kind is the type of a metric.
type Kind string

// The kinds.
const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// Writer writes families of series. It is not safe for concurrent use.
type Writer struct {
	w    *bufio.Writer
	name string
	line []byte
	// constant has the labels of all samples, and families, when set, the output by family.
	constant Labels
	families *families
}

// families are the outputs of several Parts by family, in the order of their first samples.
type families struct {
	byName map[string]*bytes.Buffer
	order  []string
}

// Part is a stream whose samples get further labels.
type Part struct {
	Labels Labels
	Write  func(*Writer)
}

// Merged is a stream of all parts, in which each family is written once. It keeps their output in
// memory. Parts with the same family must have different labels.
func Merged(parts ...Part) func(*Writer) {
	return func(to *Writer) {
		all := &families{byName: map[string]*bytes.Buffer{}}
		for _, p := range parts {
			w := &Writer{constant: p.Labels, families: all}
			p.Write(w)
		}
		for _, name := range all.order {
			_, _ = to.w.Write(all.byName[name].Bytes()) // Flush returns the error.
		}
	}
}

// NewWriter makes a Writer. Flush ends the output.
func NewWriter(w io.Writer) *Writer { return &Writer{w: bufio.NewWriterSize(w, 64<<10)} }

// Flush writes the buffered output, and returns the first error of all writes.
func (w *Writer) Flush() error { return w.w.Flush() }

// Family begins a metric; all its samples follow. help must not contain a line break or a
// backslash.
func (w *Writer) Family(name string, kind Kind, help string) {
	w.name = name
	if w.families != nil {
		if w.families.byName[name] != nil {
			return
		}
		w.families.byName[name] = &bytes.Buffer{}
		w.families.order = append(w.families.order, name)
	}
	w.line = append(w.line[:0], "# HELP "...)
	w.line = append(append(append(w.line, name...), ' '), help...)
	w.line = append(append(append(w.line, "\n# TYPE "...), name...), ' ')
	w.line = append(append(w.line, kind...), '\n')
	w.flushLine()
}

// Labels is a list of labels in their written form.
type Labels string

// NewLabels makes Labels of names and values in turns.
func NewLabels(pairs ...string) Labels { return Labels(appendLabels(nil, pairs)) }

// Sample writes a value of the current family. more has further labels: names and values in turns.
func (w *Writer) Sample(value float64, labels Labels, more ...string) {
	w.sample("", value, labels, more...)
}

func (w *Writer) sample(suffix string, value float64, labels Labels, more ...string) {
	w.line = append(append(w.line[:0], w.name...), suffix...)
	if labels != "" || w.constant != "" || len(more) > 0 {
		w.line = append(append(w.line, '{'), w.constant...)
		if w.constant != "" && labels != "" {
			w.line = append(w.line, ',')
		}
		w.line = append(w.line, labels...)
		w.line = append(appendLabels(w.line, more), '}')
	}
	w.line = append(w.line, ' ')
	if value == math.Trunc(value) && math.Abs(value) < 1<<53 {
		w.line = strconv.AppendInt(w.line, int64(value), 10)
	} else {
		w.line = strconv.AppendFloat(w.line, value, 'g', -1, 64)
	}
	w.line = append(w.line, '\n')
	w.flushLine()
}

// Histogram writes a histogram of the current family. counts has the observations between two
// bounds, and one more entry for those above the last bound; nil is an empty histogram.
func (w *Writer) Histogram(bounds []float64, counts []uint64, sum float64, labels Labels) {
	var total uint64
	for i, n := range counts {
		total += n
		if i < len(bounds) {
			w.sample("_bucket", float64(total), labels, "le", strconv.FormatFloat(bounds[i], 'g', -1, 64))
		}
	}
	w.sample("_bucket", float64(total), labels, "le", "+Inf")
	w.sample("_sum", sum, labels)
	w.sample("_count", float64(total), labels)
}

func (w *Writer) flushLine() {
	if w.families != nil {
		w.families.byName[w.name].Write(w.line)
		return
	}
	_, _ = w.w.Write(w.line) // Flush returns the error.
}

var escapeValue = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// appendLabels appends labels to a written list, which is empty or ends with a label.
func appendLabels(dst []byte, pairs []string) []byte {
	for i := 0; i+1 < len(pairs); i += 2 {
		if n := len(dst); n > 0 && dst[n-1] != '{' {
			dst = append(dst, ',')
		}
		dst = append(append(dst, pairs[i]...), '=', '"')
		value := pairs[i+1]
		if strings.ContainsAny(value, "\\\n\"") {
			value = escapeValue.Replace(value)
		}
		dst = append(append(dst, value...), '"')
	}
	return dst
}

// Bool returns 1 for true and 0 for false.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Handler serves the metrics of a registry, followed by those that each of streams writes. The
// streams must not write a metric of the registry or of another stream.
func Handler(registry prometheus.Gatherer, streams ...func(*Writer)) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		families, err := registry.Gather()
		if err != nil {
			http.Error(rw, "collecting metrics failed: "+err.Error(), http.StatusInternalServerError)
			return
		}
		rw.Header().Set("Content-Type", string(expfmt.NewFormat(expfmt.TypeTextPlain)))
		var body io.Writer = rw
		if acceptsGzip(r) {
			rw.Header().Set("Content-Encoding", "gzip")
			zip, _ := gzip.NewWriterLevel(rw, gzip.BestSpeed)
			defer func() { _ = zip.Close() }()
			body = zip
		}
		w := NewWriter(body)
		for _, family := range families {
			if _, err := expfmt.MetricFamilyToText(w.w, family); err != nil {
				return
			}
		}
		for _, stream := range streams {
			stream(w)
		}
		_ = w.Flush() // The client has closed the connection.
	})
}

func acceptsGzip(r *http.Request) bool {
	for part := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		coding, parameters, _ := strings.Cut(strings.TrimSpace(part), ";")
		if coding == "gzip" && strings.TrimSpace(parameters) != "q=0" {
			return true
		}
	}
	return false
}
