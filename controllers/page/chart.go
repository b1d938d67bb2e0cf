package page

import (
	"fmt"
	"html/template"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

func accepted(p point) int64  { return p.accepted }
func delivered(p point) int64 { return p.delivered }
func failed(p point) int64    { return p.failed }
func pending(p point) int64   { return p.pending }

// rate is the mean of the last minute, a second; "" without a past.
func rate(past []point, of func(point) int64) string {
	const minute = int(time.Minute / interval)
	last := past[max(0, len(past)-minute):]
	if len(last) == 0 {
		return ""
	}
	var sum int64
	for _, p := range last {
		sum += of(p)
	}
	perSecond := float64(sum) / (float64(len(last)) * interval.Seconds())
	switch {
	case perSecond == 0:
		return "0/s"
	case perSecond < 0.1:
		return fmt.Sprintf("%.1f/min", perSecond*60)
	case perSecond < 10:
		return fmt.Sprintf("%.1f/s", perSecond)
	}
	return short(int64(perSecond)) + "/s"
}

const sparkWidth, sparkHeight = 240, 40

// spark draws the past, at most 60 minutes, with the newest at the right, as SVG that contains numbers and an
// escaped label only.
func spark(label string, past []point, of func(point) int64) template.HTML {
	if len(past) < 2 {
		return ""
	}
	most := int64(1)
	for _, p := range past {
		most = max(most, of(p))
	}
	var line strings.Builder
	for i, p := range past {
		fmt.Fprintf(&line, "%c%.1f %.1f", "ML"[min(i, 1)], float64(i)*sparkWidth/float64(len(past)-1),
			sparkHeight-2-float64(of(p))*(sparkHeight-4)/float64(most))
	}
	area := fmt.Sprintf("%sL%d %dL0 %dZ", line.String(), sparkWidth, sparkHeight, sparkHeight)
	return template.HTML(fmt.Sprintf(`<svg class="spark" viewBox="0 0 %d %d" preserveAspectRatio="none" role="img" aria-label="%s, last %d minutes, at most %d in %d s"><path class="area" d="%s"/><path class="line" d="%s"/></svg>`, //nolint:gosec // numbers and an escaped label
		sparkWidth, sparkHeight, template.HTMLEscapeString(label), len(past)*int(interval.Seconds())/60, most, int(interval.Seconds()), area,
		line.String()))
}

// part is a phase of an attempt.
type part struct {
	Name, Class string
	Duration    time.Duration
}

// parts splits the duration of an attempt. The rest is mostly the wait for the end of the response.
func parts(a adminapi.Attempt) []part {
	t := a.Timing
	list := []part{{"DNS", "dns", t.DNS}, {"connect", "connect", t.Connect}, {"TLS", "tls", t.TLS}, {"first byte", "wait", t.FirstByte}}
	rest := a.Duration
	for _, p := range list {
		rest -= p.Duration
	}
	return append(list, part{"rest", "rest", max(0, rest)})
}

// attemptChart draws a bar for each attempt, newest at the right: its height is the time, split into
// phases; a failure has a mark below.
func attemptChart(newestFirst []adminapi.Attempt) template.HTML {
	if len(newestFirst) == 0 {
		return ""
	}
	const width, height, step = 12 * maxAttempts, 140, 12
	most := time.Millisecond
	for _, a := range newestFirst {
		most = max(most, a.Duration)
	}
	var out strings.Builder
	fmt.Fprintf(&out, `<svg class="bars" viewBox="0 0 %d %d" role="img" aria-label="time of the last %s, at most %s">`, width, height+14, count(int64(len(newestFirst)), "attempt"), span(most))
	fmt.Fprintf(&out, `<line class="grid" x1="0" x2="%d" y1="1" y2="1"/><line class="grid" x1="0" x2="%d" y1="%d" y2="%[3]d"/><text x="2" y="13">%s</text>`, width, width, height, span(most))
	for i, a := range newestFirst {
		x, y := width-step*(i+1)+1, float64(height)
		for _, p := range parts(a) {
			h := float64(p.Duration) * (height - 2) / float64(most)
			if h <= 0 {
				continue
			}
			y -= h
			fmt.Fprintf(&out, `<rect class="%s" x="%d" y="%.1f" width="%d" height="%.1f"/>`, p.Class, x, y, step-2, h)
		}
		if a.Reason != "" {
			fmt.Fprintf(&out, `<rect class="failed" x="%d" y="%d" width="%d" height="6" rx="1"/>`, x, height+5, step-2)
		}
	}
	out.WriteString("</svg>")
	return template.HTML(out.String()) //nolint:gosec // numbers only
}
