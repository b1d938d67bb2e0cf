package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/intake/route"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/plural"
)

func newRender() *cobra.Command {
	var r renderer
	var dir, call, at, cases, output string
	var secrets []string
	cmd := &cobra.Command{
		Use:   "render -f FILE (--call JSON | --cases FILE)",
		Short: "Print the requests that destinations would get for a call",
		Long: `Prints the requests that the destinations in a file (or folder) of manifests would get for
a call: method, URL, headers with signatures, and body. It sends nothing. With --cases it compares
the requests for the calls of a file with the expected ones, and prints each difference.

A Source that a destination refers to need not be in the manifests. A key of a Secret that neither the
manifests nor --secret have is "posthorn-placeholder", and a URL "https://placeholder.invalid/"; NOTICE lines name
them. TLS settings, suspensions and the egress policy are not considered.

Exits 1 if a manifest is not accepted, a request cannot be made, or a case differs.`,
		Example: `  posthorn render -f destination.yaml --call @call.json
  posthorn render -f webhooks --destination crm --call '{"type":"track","event":"Order Completed","userId":"u1"}' -o yaml
  posthorn render -f destination.yaml --cases cases.yaml
  kubectl posthorn deadletters show crm order-17 -o json | posthorn render -f destination.yaml --call @-`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case dir == "":
				return command.Usagef("the manifests are missing; set -f FILE or -f DIR")
			case (call == "") == (cases == ""):
				return command.Usagef("set exactly one of --call and --cases")
			}
			now := time.Now()
			if at != "" {
				var err error
				if now, err = time.Parse(time.RFC3339, at); err != nil {
					return command.Usagef("--time: write it like 2026-01-02T03:04:05Z")
				}
			}
			values, err := standalone.ReadSecretValues(secrets)
			if err != nil {
				return command.Usagef("--secret: %v", err)
			}
			if r.compiled, err = standalone.CompileDestinations(dir, values, compile.Policy{}); err != nil {
				return err
			}
			if err := r.notices(cmd.ErrOrStderr()); err != nil {
				return err
			}
			if cases != "" {
				return r.check(cmd.OutOrStdout(), cases)
			}
			text, err := command.ReadJSON("call", call, cmd.InOrStdin(), "render one call at a time")
			if err != nil {
				return err
			}
			results, err := r.render(renderCase{Call: callOf(text), Time: now})
			if err != nil {
				return err
			}
			return printRendered(cmd.OutOrStdout(), output, results)
		},
	}
	f := cmd.Flags()
	command.ManifestsFlag(cmd, &dir, "file or folder of manifests")
	command.NamespaceFlag(cmd, &r.namespace)
	f.StringVar(&r.destination, "destination", "", "the name of a destination; default: all of the namespace")
	f.StringVar(&r.source, "source", "", "the name of the call's Source; default: the first one of each destination")
	f.StringVar(&call, "call", "", "the call as JSON with its type, or a dead letter; @FILE or @- for standard input")
	f.StringVar(&at, "time", "", "the time at which the call is received and sent, such as 2026-01-02T03:04:05Z; default: now")
	f.StringVar(&cases, "cases", "", "file of calls with the expected requests")
	command.OutputFlag(cmd, &output, "", "print the requests as yaml or json", "yaml", "json")
	registerSecrets(cmd, &secrets)
	return cmd
}

// callOf returns the message of a dead letter that "deadletters show -o json" printed, or the call itself.
func callOf(text []byte) json.RawMessage {
	var letter struct {
		Key, FailedAt string
		Body          json.RawMessage
	}
	if json.Unmarshal(text, &letter) == nil && letter.Key != "" && letter.FailedAt != "" && len(letter.Body) > 0 {
		return letter.Body
	}
	return text
}

// renderer renders the requests of compiled destinations.
type renderer struct {
	compiled                       standalone.Completed
	namespace, destination, source string
}

// renderCase is a call, and the expected request for --cases.
type renderCase struct {
	Name        string          `json:"name"`
	Destination string          `json:"destination"`
	Source      string          `json:"source"`
	Time        time.Time       `json:"time"`
	Call        json.RawMessage `json:"call"`
	// Endpoint is the one of Request; the first one if it is empty.
	Endpoint string           `json:"endpoint"`
	Request  *expectedRequest `json:"request"`
	// Outcome is expected in place of a request: Filtered, Omitted or Failed. Error is a part of the text of a failure.
	Outcome string `json:"outcome"`
	Error   string `json:"error"`
}

// expectedRequest has what is compared of a request.
type expectedRequest struct {
	Method  string            `json:"method"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	// Body is a text, which is compared byte by byte, or another JSON value.
	Body json.RawMessage `json:"body"`
}

// The outcomes without a request.
const (
	outcomeFiltered = "Filtered"
	outcomeOmitted  = "Omitted"
	outcomeFailed   = "Failed"
)

// renderResult is what one endpoint gets, or an outcome for its destination.
type renderResult struct {
	Destination string           `json:"destination"`
	Source      string           `json:"source"`
	Endpoint    string           `json:"endpoint,omitempty"`
	Method      string           `json:"method,omitempty"`
	URL         string           `json:"url,omitempty"`
	Headers     []renderedHeader `json:"headers,omitempty"`
	Body        string           `json:"body,omitempty"`
	Outcome     string           `json:"outcome,omitempty"`
	Error       string           `json:"error,omitempty"`
}

type renderedHeader struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// notices prints the problems of the manifests and the placeholders.
func (r *renderer) notices(w io.Writer) error {
	for _, p := range slices.Concat(r.compiled.Problems, r.compiled.NotAccepted) {
		fmt.Fprintln(w, p)
	}
	if keys := r.compiled.Placeholders; len(keys) > 0 {
		fmt.Fprintf(w, "NOTICE: no manifest has %s; what needs these keys of Secrets has a placeholder\n",
			strings.Join(keys, ", "))
	}
	if len(r.compiled.Problems)+len(r.compiled.NotAccepted) > 0 {
		return command.ErrFailed
	}
	return nil
}

// renderID is the messageId of a call without one.
const renderID = "render-00000000-0000-4000-8000-000000000000"

// message makes the message of a call.
func (c *renderCase) message() (*event.Call, error) {
	var head struct {
		Type   event.Type `json:"type"`
		UserID string     `json:"userId"`
	}
	if err := json.Unmarshal(c.Call, &head); err != nil {
		return nil, fmt.Errorf("the call is not a JSON object: %w", err)
	}
	switch head.Type {
	case "":
		return nil, fmt.Errorf("the call has no type; add one, such as \"type\": \"track\"")
	case event.Delete:
		return &event.Call{Type: event.Delete, MessageID: renderID, UserID: head.UserID, Body: event.DeleteMessage(head.UserID, c.Time)}, nil
	}
	batch, err := event.Request{Type: head.Type, ReceivedAt: c.Time, NewID: func() string { return renderID }}.Parse(c.Call)
	if err != nil {
		return nil, fmt.Errorf("the call would be rejected: %w", err)
	}
	return &batch.Calls[0], nil
}

// render returns the requests of all chosen destinations for a case.
func (r *renderer) render(c renderCase) (list []renderResult, err error) {
	call, err := c.message()
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range r.compiled.Configs {
		config := &r.compiled.Configs[i]
		if config.Namespace != r.namespace {
			continue
		}
		router, err := route.New(*config)
		if err != nil {
			return nil, err
		}
		for j := range config.Destinations {
			d := &config.Destinations[j]
			names = append(names, d.Name)
			if name := cmp.Or(c.Destination, r.destination); name != "" && name != d.Name {
				continue
			}
			one, err := renderDestination(config.Namespace, d, router, call, cmp.Or(c.Source, r.source), c.Time)
			if err != nil {
				return nil, err
			}
			list = append(list, one...)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("namespace %q has no such destination; the manifests have %s", r.namespace, cmp.Or(strings.Join(names, ", "), "none"))
	}
	return list, nil
}

func renderDestination(namespace string, d *liveconfig.Destination, router *route.Router, call *event.Call, source string,
	now time.Time) (list []renderResult, err error) {
	if source == "" {
		source = d.Sources[0]
	} else if !slices.Contains(d.Sources, source) {
		return nil, fmt.Errorf("destination %s does not get the calls of Source %q; use one of %s", d.Name, source, strings.Join(d.Sources, ", "))
	}
	of := renderResult{Destination: d.Name, Source: source}
	skip, _ := router.Skip(source, call)
	for _, entry := range skip {
		key := namespace + "/" + d.Name
		if entry == key && call.Type != event.Delete {
			of.Outcome = outcomeFiltered
			return append(list, of), nil
		}
		if why, failed := strings.CutPrefix(entry, queue.FilterFailed(key, "")); failed {
			of.Outcome, of.Error = outcomeFailed, "FilterFailed: "+why
			return append(list, of), nil
		}
	}
	requests, err := delivery.Render(namespace, d, &queue.Message{Source: namespace + "/" + source, ID: call.MessageID,
		Type: string(call.Type), AcceptedAt: now, LongNumbers: call.LongNumbers, Body: call.Body}, now)
	switch {
	case err != nil:
		of.Outcome, of.Error = outcomeFailed, err.Error()
		return append(list, of), nil
	case len(requests) == 0:
		of.Outcome = outcomeOmitted
		return append(list, of), nil
	}
	for _, q := range requests {
		one := of
		one.Endpoint, one.Method, one.URL, one.Body = q.Endpoint, q.Method, q.URL, string(q.Body)
		for _, h := range q.Headers {
			one.Headers = append(one.Headers, renderedHeader(h))
		}
		list = append(list, one)
	}
	return list, nil
}

// printRendered prints results. A result that failed makes the command fail.
func printRendered(w io.Writer, format string, results []renderResult) error {
	failed := false
	for i, r := range results {
		failed = failed || r.Outcome == outcomeFailed
		switch format {
		case "json":
			if err := json.NewEncoder(w).Encode(r); err != nil {
				return err
			}
			continue
		case "yaml":
			text, err := yaml.Marshal(r)
			if err != nil {
				return err
			}
			fmt.Fprintf(w, "---\n%s", text)
			continue
		}
		if i > 0 {
			fmt.Fprintln(w)
		}
		if r.Outcome != "" {
			fmt.Fprintf(w, "# %s: %s\n", r.Destination, strings.TrimSuffix(r.Outcome+": "+r.Error, ": "))
			continue
		}
		fmt.Fprintf(w, "# %s, endpoint %s, Source %s\n%s %s\n", r.Destination, r.Endpoint, r.Source, r.Method, r.URL)
		for _, h := range r.Headers {
			fmt.Fprintf(w, "%s: %s\n", h.Name, h.Value)
		}
		fmt.Fprintf(w, "\n%s\n", r.Body)
	}
	if failed {
		return command.ErrFailed
	}
	return nil
}

// check renders the cases of a file, and prints the differences from the expected requests.
func (r *renderer) check(w io.Writer, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return command.UsageError(err)
	}
	var cases []renderCase
	if err := yaml.UnmarshalStrict(text, &cases); err != nil {
		return fmt.Errorf("%s: it must be a list of cases with call and request: %w", file, err)
	}
	differing := 0
	for i, c := range cases {
		if c.Name = cmp.Or(c.Name, fmt.Sprintf("case %d", i+1)); c.Time.IsZero() {
			c.Time = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		}
		differences, err := r.differences(c)
		if err != nil {
			return fmt.Errorf("%s: %s: %w", file, c.Name, err)
		}
		for _, d := range differences {
			fmt.Fprintf(w, "%s: %s\n", c.Name, d)
		}
		if len(differences) > 0 {
			differing++
		}
	}
	if differing > 0 {
		fmt.Fprintf(w, "%d of %s differ\n", differing, plural.Count(len(cases), "case"))
		return command.ErrFailed
	}
	fmt.Fprintf(w, "%s as expected\n", plural.Count(len(cases), "case"))
	return nil
}

// differences compares the result for a case with the expected one.
func (r *renderer) differences(c renderCase) (list []string, err error) {
	switch {
	case len(c.Call) == 0:
		return nil, fmt.Errorf("call is missing")
	case (c.Request == nil) == (c.Outcome == ""):
		return nil, fmt.Errorf("set exactly one of request and outcome")
	case c.Outcome != "" && !slices.Contains([]string{outcomeFiltered, outcomeOmitted, outcomeFailed}, c.Outcome):
		return nil, fmt.Errorf("outcome %q is unknown; use Filtered, Omitted or Failed", c.Outcome)
	}
	results, err := r.render(c)
	if err != nil {
		return nil, err
	}
	differ := func(what string, got, want any) {
		list = append(list, fmt.Sprintf("%s:\n  got  %v\n  want %v", what, got, want))
	}
	i := slices.IndexFunc(results, func(r renderResult) bool { return c.Endpoint == "" || r.Endpoint == "" || r.Endpoint == c.Endpoint })
	if i < 0 {
		return nil, fmt.Errorf("the destination has no endpoint %q", c.Endpoint)
	}
	got := results[i]
	if got.Outcome != c.Outcome {
		differ("outcome", cmp.Or(got.Outcome, "a request"), cmp.Or(c.Outcome, "a request"))
		if got.Error != "" {
			list = append(list, "error: "+got.Error)
		}
		return list, nil
	}
	if !strings.Contains(got.Error, c.Error) {
		differ("error", got.Error, c.Error)
	}
	if c.Request == nil {
		return list, nil
	}
	if want := c.Request.Method; want != "" && want != got.Method {
		differ("method", got.Method, want)
	}
	if want := c.Request.URL; want != "" && want != got.URL {
		differ("url", got.URL, want)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Request.Headers)) {
		value := "no such header"
		for _, h := range got.Headers {
			if strings.EqualFold(h.Name, name) {
				value = h.Value
			}
		}
		if want := c.Request.Headers[name]; value != want {
			differ("header "+name, value, want)
		}
	}
	if c.Request.Body != nil {
		compareBody(got.Body, c.Request.Body, differ)
	}
	return list, nil
}

// compareBody compares a body with a text, or with the parts of a JSON value.
func compareBody(got string, want json.RawMessage, differ func(what string, got, want any)) {
	var text string
	if json.Unmarshal(want, &text) == nil {
		if got != text {
			differ("body", got, text)
		}
		return
	}
	decode := func(text []byte) (v any, err error) {
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber()
		return v, d.Decode(&v)
	}
	wanted, _ := decode(want)
	parsed, err := decode([]byte(got))
	if err != nil {
		differ("body", got, string(want))
		return
	}
	compareJSON("body", parsed, wanted, differ)
}

// compareJSON reports the smallest parts that differ, by their paths.
func compareJSON(path string, got, want any, differ func(what string, got, want any)) {
	text := func(v any) string {
		b, _ := json.Marshal(v)
		return string(b)
	}
	g, isObject := got.(map[string]any)
	w, wantObject := want.(map[string]any)
	if isObject && wantObject {
		for _, key := range slices.Sorted(maps.Keys(merged(g, w))) {
			a, inGot := g[key]
			b, inWant := w[key]
			switch {
			case !inGot:
				differ(path+"."+key, "nothing", text(b))
			case !inWant:
				differ(path+"."+key, text(a), "nothing")
			default:
				compareJSON(path+"."+key, a, b, differ)
			}
		}
		return
	}
	gl, isList := got.([]any)
	wl, wantList := want.([]any)
	if isList && wantList && len(gl) == len(wl) {
		for i := range gl {
			compareJSON(fmt.Sprintf("%s[%d]", path, i), gl[i], wl[i], differ)
		}
		return
	}
	if !reflect.DeepEqual(got, want) {
		differ(path, text(got), text(want))
	}
}

func merged(a, b map[string]any) map[string]any {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}
