package page

import (
	"cmp"
	"context"
	"fmt"
	"html/template"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/why"
)

const maxAttempts = 60

type detail struct {
	row
	Exists    bool
	Findings  []why.Finding
	Endpoints []endpoint
	// Recent is the number of the last attempts, Succeeded how many of them were successful.
	Recent, Succeeded int
	P50, P99          time.Duration
	// Result selects the attempts of the table and the chart; "" selects all.
	Result   string
	Attempts []adminapi.Attempt
	Chart    template.HTML
	// Missing names the dispatchers whose attempts could not be read.
	Missing  string
	Codes    []code
	Config   string
	Revision string

	DeliveredSpark, PendingSpark, FailedSpark template.HTML
	History                                   bool
}

type endpoint struct {
	Pod, Host, Class string
	adminapi.EndpointReport
	// CertificateExpires is when the receiver's certificate expires; zero if it is not known.
	CertificateExpires time.Time
}

// code is a result of attempts or dead letters: a status code or a reason.
type code struct {
	Text string
	OK   bool
	N    int
}

// hasResult reports whether a result is the selected one: a status code, a class of them such as 5xx, a
// reason, or "delivered"; "" selects all.
func hasResult(selected string, status int, reason string) bool {
	text := fmt.Sprint(status)
	return selected == "" || selected == text || strings.EqualFold(selected, text[:1]+"xx") || strings.EqualFold(selected, cmp.Or(reason, "delivered"))
}

func (p *Page) newDetail(ctx context.Context, v view, namespace, name, result string) (detail, error) {
	k := key{namespace, name}
	attempts, missing := p.attempts(ctx, k)
	d := detail{row: p.newRow(v, k), Result: result}
	if missing != nil {
		d.Missing = missing.Error()
	}
	oldestFirst := slices.Clone(attempts)
	slices.Reverse(oldestFirst)
	d.Findings = v.explain(k, oldestFirst)
	d.Cause = why.Cause(d.Findings)
	object := v.destinations[k]
	d.Exists = object != nil
	hosts := map[string]string{}
	if object != nil {
		var err error
		d.Revision = object.Status.Revision
		for _, e := range object.Spec.Endpoints {
			hosts[e.Name] = shownURL(e.URL)
		}
		if d.Config, err = shownConfig(object.Spec); err != nil {
			return detail{}, err
		}
	}
	expires := map[string]time.Time{}
	for _, a := range oldestFirst {
		if !a.CertificateExpires.IsZero() {
			expires[a.Endpoint] = a.CertificateExpires
		}
	}
	for _, pod := range slices.Sorted(maps.Keys(v.indices)) {
		var reported adminapi.DestinationReport
		v.indices[pod].Namespace(namespace).ReadDestination(name, &reported)
		for _, e := range reported.Endpoints {
			class := map[adminapi.EndpointState]string{adminapi.EndpointHealthy: "ok", adminapi.EndpointIdle: "idle",
				adminapi.EndpointDegraded: "notice"}[e.State]
			if e.State.Open() {
				class = "problem"
			}
			d.Endpoints = append(d.Endpoints, endpoint{pod, hosts[e.Name], class, e, expires[e.Name]})
		}
	}
	recent := attempts[:min(len(attempts), maxAttempts)]
	d.Recent = len(recent)
	d.Succeeded, d.Codes = results(recent)
	d.P50, d.P99 = percentile(recent, 50), percentile(recent, 99)
	attempts = slices.DeleteFunc(attempts, func(a adminapi.Attempt) bool { return !hasResult(result, a.StatusCode, a.Reason) })
	d.Attempts = attempts[:min(len(attempts), maxAttempts)]
	d.Chart = attemptChart(d.Attempts)
	p.mu.Lock()
	past := p.past.series[k].list()
	p.mu.Unlock()
	d.History, d.Rate = len(past) > 1, rate(past, delivered)
	d.DeliveredSpark, d.PendingSpark, d.FailedSpark = spark("messages delivered", past, delivered), spark("messages pending", past, pending),
		spark("dead letters", past, failed)
	return d, nil
}

// results counts the attempts by result, the most frequent first.
func results(attempts []adminapi.Attempt) (succeeded int, codes []code) {
	counts := map[string]*code{}
	for _, a := range attempts {
		text := a.Reason
		if a.StatusCode != 0 {
			text = fmt.Sprint(a.StatusCode)
		}
		if a.Reason == "" {
			succeeded++
		}
		if counts[text] == nil {
			counts[text] = &code{Text: text, OK: a.Reason == ""}
		}
		counts[text].N++
	}
	return succeeded, mostFrequent(counts)
}

func mostFrequent(counts map[string]*code) (codes []code) {
	for _, c := range counts {
		codes = append(codes, *c)
	}
	slices.SortFunc(codes, func(a, b code) int { return cmp.Or(b.N-a.N, strings.Compare(a.Text, b.Text)) })
	return codes
}

// percentile is the duration within which this part of the attempts ended; 0 without attempts.
func percentile(attempts []adminapi.Attempt, percent int) time.Duration {
	if len(attempts) == 0 {
		return 0
	}
	var all []time.Duration
	for _, a := range attempts {
		all = append(all, a.Duration)
	}
	slices.Sort(all)
	return all[(len(all)-1)*percent/100]
}

const hidden = "(hidden)"

// shownConfig is a spec as YAML. Values of headers, and all parts of a URL but its host, can be
// secrets, although they should be in Secrets.
func shownConfig(spec v1beta1.WebhookDestinationSpec) (string, error) {
	s := spec.DeepCopy()
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		e.URL = shownURL(e.URL)
		for j := range e.Headers {
			if value := hidden; e.Headers[j].Value != nil {
				e.Headers[j].Value = &value
			}
		}
	}
	text, err := yaml.Marshal(s)
	return string(text), err
}

// shownURL is the scheme and host of a URL. The path can contain a token, as in the URLs of chat
// services.
func shownURL(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" {
		return hidden
	}
	shown := u.Scheme + "://" + u.Host
	if u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		shown += "/" + hidden
	}
	return shown
}
