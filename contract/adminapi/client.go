package adminapi

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	maxReportBytes = 64 << 20
	maxErrorBytes  = 64 << 10
)

// ErrNotModified means that nothing changed since the given cursor.
var ErrNotModified = errors.New("report not modified")

// ReportCursor is the parameter of GET /report with the cursor of the last report, or "" for a full
// report.
const ReportCursor = "since"

// StatusError is a response with another status than the expected one.
type StatusError struct {
	StatusCode int
	// Message is the response's text, or the message of a Kubernetes Status.
	Message string
}

func (e *StatusError) Error() string { return e.Message }

// Client requests the admin API of one dispatcher. Its zero value with a URL is ready to use.
// Several goroutines can use it.
type Client struct {
	// URL is the root of the admin API, for example "https://10.0.0.7:8081".
	URL string
	// HTTP sends the requests; nil is http.DefaultClient.
	HTTP *http.Client
	// ReportSlots, when set, bounds the reports that clients with the same channel read at once,
	// by its capacity.
	ReportSlots chan struct{}
	// ReportTimeout, when set, bounds the wait for the answer to Report, and then its transfer; the
	// wait for a slot is not part of either.
	ReportTimeout time.Duration
}

// ErrReportTimeout means that the dispatcher did not report within Client.ReportTimeout.
var ErrReportTimeout = errors.New("no report in time")

// Report returns what changed in the dispatcher since the cursor of an earlier report: a delta, or
// a full report if the dispatcher does not know the cursor, for example because it was restarted.
// Without a cursor the report is full. Report returns ErrNotModified if nothing changed.
func (c *Client) Report(ctx context.Context, cursor string) (_ *Report, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, ErrReportTimeout) {
			err = cause
		}
	}()
	// within starts ReportTimeout; stop ends it.
	within := func() (stop func() bool) {
		if c.ReportTimeout <= 0 {
			return func() bool { return true }
		}
		return time.AfterFunc(c.ReportTimeout, func() { cancel(fmt.Errorf("%w: after %v", ErrReportTimeout, c.ReportTimeout)) }).Stop
	}
	stop := within()
	resp, err := c.send(ctx, http.MethodGet, "/report?"+url.Values{ReportCursor: {cursor}}.Encode(), nil, nil)
	stop()
	if status, ok := errors.AsType[*StatusError](err); ok && status.StatusCode == http.StatusNotModified {
		return nil, ErrNotModified
	}
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if c.ReportSlots != nil {
		select {
		case c.ReportSlots <- struct{}{}:
			defer func() { <-c.ReportSlots }()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	defer within()()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxReportBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read report: %w", err)
	}
	if len(text) > maxReportBytes {
		return nil, fmt.Errorf("report is larger than %d bytes", maxReportBytes)
	}
	var report Report
	if err := json.Unmarshal(text, &report); err != nil {
		return nil, fmt.Errorf("decode report: %w", err)
	}
	return &report, nil
}

// DeadLetters returns up to limit dead letters of a destination ("namespace/name"), without their
// bodies, oldest first. The limit is 1 to 10,000.
func (c *Client) DeadLetters(ctx context.Context, destination string, limit int) iter.Seq2[DeadLetter, error] {
	// An error of the store is the last line of the response.
	type line struct {
		DeadLetter
		Error string `json:"error"`
	}
	query := url.Values{"destination": {destination}, "limit": {strconv.Itoa(limit)}}
	return func(yield func(DeadLetter, error) bool) {
		for l, err := range lines[line](ctx, c, "/deadletters?"+query.Encode()) {
			if err == nil && l.Error != "" {
				err = errors.New(l.Error)
			}
			if !yield(l.DeadLetter, err) || err != nil {
				return
			}
		}
	}
}

// DeadLettersStored returns the number of a destination's stored dead letters.
func (c *Client) DeadLettersStored(ctx context.Context, destination string) (int64, error) {
	n, err := read[DeadLetterCount](ctx, c, http.MethodGet, "/deadletters/count?"+url.Values{"destination": {destination}}.Encode())
	return n.Stored, err
}

// DeadLetter returns one dead letter of a destination ("namespace/name") without its body. The error
// is a *StatusError with the status 404 if there is none with this key.
func (c *Client) DeadLetter(ctx context.Context, destination, key string) (DeadLetter, error) {
	return c.deadLetter(ctx, "", destination, key)
}

// DeadLetterWithBody is DeadLetter with the body.
func (c *Client) DeadLetterWithBody(ctx context.Context, destination, key string) (DeadLetter, error) {
	return c.deadLetter(ctx, BodiesPath, destination, key)
}

func (c *Client) deadLetter(ctx context.Context, prefix, destination, key string) (DeadLetter, error) {
	query := url.Values{"destination": {destination}}
	return read[DeadLetter](ctx, c, http.MethodGet, prefix+"/deadletters/"+url.PathEscape(key)+"?"+query.Encode())
}

// Redeliver makes the selected dead letters pending again. It returns the last progress, and calls
// onProgress, unless nil, with every one. The error io.ErrUnexpectedEOF means that the dispatcher
// stopped before the end.
func (c *Client) Redeliver(ctx context.Context, a DeadLetterAction, onProgress func(DeadLetterProgress)) (DeadLetterProgress, error) {
	return c.act(ctx, "redeliver", a, onProgress)
}

// Purge removes the selected dead letters. It returns what Redeliver returns.
func (c *Client) Purge(ctx context.Context, a DeadLetterAction, onProgress func(DeadLetterProgress)) (DeadLetterProgress, error) {
	return c.act(ctx, "purge", a, onProgress)
}

func (c *Client) act(ctx context.Context, verb string, a DeadLetterAction, onProgress func(DeadLetterProgress)) (p DeadLetterProgress,
	err error) {
	body, err := json.Marshal(a)
	if err != nil {
		return p, err
	}
	resp, err := c.send(ctx, http.MethodPost, "/deadletters/"+verb, bytes.NewReader(body), nil)
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	return follow(resp.Body, onProgress)
}

// Test sends a test event to an endpoint of a destination ("namespace/name"), or to each one with "", and returns the
// attempts. The error is a *StatusError with the status 404 if there is no such endpoint, 409 if the destination does
// not send, and 429 after too many tests.
func (c *Client) Test(ctx context.Context, destination, endpoint string) ([]Attempt, error) {
	query := url.Values{"destination": {destination}, "endpoint": {endpoint}}
	return read[[]Attempt](ctx, c, http.MethodPost, "/test?"+query.Encode())
}

// Discard deletes the parked objects with a name, and returns them; with dryRun it only returns them. Only posthorn
// run serves it.
func (c *Client) Discard(ctx context.Context, namespace, name string, dryRun bool) ([]string, error) {
	query := url.Values{"namespace": {namespace}, "name": {name}, "dryRun": {strconv.FormatBool(dryRun)}}
	return read[[]string](ctx, c, http.MethodPost, "/discard?"+query.Encode())
}

// follow reads the response to a DeadLetterAction to its end. It returns the last
// progress and calls each, unless nil, with every one. io.ErrUnexpectedEOF means that the pod
// stopped before the end.
func follow(answer io.Reader, each func(DeadLetterProgress)) (p DeadLetterProgress, err error) {
	lines := bufio.NewScanner(answer)
	for lines.Scan() {
		p = DeadLetterProgress{}
		if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
			return p, err
		}
		if each != nil {
			each(p)
		}
		if p.Error != "" {
			return p, errors.New(p.Error)
		}
		if p.Done {
			return p, nil
		}
	}
	return p, cmp.Or(lines.Err(), io.ErrUnexpectedEOF)
}

// Attempts returns the last attempts at an endpoint of a destination ("namespace/name"), oldest
// first, or at all its endpoints if endpoint is empty.
func (c *Client) Attempts(ctx context.Context, destination, endpoint string) iter.Seq2[Attempt, error] {
	return lines[Attempt](ctx, c, "/attempts?"+url.Values{"destination": {destination}, "endpoint": {endpoint}}.Encode())
}

// Tail returns attempts as they end, until ctx is done or the dispatcher stops
// (io.ErrUnexpectedEOF). An empty destination ("namespace/name") or endpoint matches all.
func (c *Client) Tail(ctx context.Context, destination, endpoint string) iter.Seq2[AttemptWithBody, error] {
	return lines[AttemptWithBody](ctx, c, "/tail?"+url.Values{"destination": {destination}, "endpoint": {endpoint}}.Encode())
}

// TailWithBodies is Tail with the bodies of the requests.
func (c *Client) TailWithBodies(ctx context.Context, destination, endpoint string) iter.Seq2[AttemptWithBody, error] {
	return lines[AttemptWithBody](ctx, c, BodiesPath+"/tail?"+url.Values{"destination": {destination}, "endpoint": {endpoint}}.Encode())
}

// Debug opens data of a dispatcher that runs with --debug: "lanes" (lines of LaneState), "config"
// or "pprof/NAME". The caller closes it.
func (c *Client) Debug(ctx context.Context, name string) (io.ReadCloser, error) {
	resp, err := c.Get(ctx, "/debug/"+name, "*/*")
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Metrics returns the metrics in Prometheus' text format.
func (c *Client) Metrics(ctx context.Context) (string, error) {
	resp, err := c.Get(ctx, "/metrics", "text/plain")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// Get requests a path, with its query, that has no method here, such as the resources of posthorn run. A response with
// another status than 200 is a *StatusError. The caller closes the body.
func (c *Client) Get(ctx context.Context, path, accept string) (*http.Response, error) {
	return c.send(ctx, http.MethodGet, path, nil, http.Header{"Accept": {accept}})
}

// read returns the value in the response to a request.
func read[T any](ctx context.Context, c *Client, method, path string) (value T, _ error) {
	resp, err := c.send(ctx, method, path, nil, http.Header{"Accept": {"application/json"}})
	if err != nil {
		return value, err
	}
	defer resp.Body.Close()
	err = json.NewDecoder(resp.Body).Decode(&value)
	return value, err
}

// send returns a response with the status 200; any other becomes a *StatusError.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(c.URL, "/")+path, body)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil || resp.StatusCode == http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
	return nil, &StatusError{StatusCode: resp.StatusCode, Message: errorMessage(resp.Status, text)}
}

// errorMessage returns the message of a Kubernetes Status, or the status line and the text.
func errorMessage(status string, text []byte) string {
	if bytes.Contains(text, []byte("send calls to /v1/")) {
		return "this is the address for calls; set the address of the admin API (default port 8081)"
	}
	var s struct{ Kind, Message string }
	if json.Unmarshal(text, &s) == nil && s.Kind == "Status" && s.Message != "" {
		return s.Message
	}
	return strings.TrimSuffix(status+": "+strings.TrimSpace(string(text)), ": ")
}

// lines requests a path and returns the values of the response, one for each line of JSON.
func lines[T any](ctx context.Context, c *Client, path string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		resp, err := c.Get(ctx, path, "application/x-ndjson")
		if err != nil {
			yield(none, err)
			return
		}
		defer resp.Body.Close()
		for in := json.NewDecoder(resp.Body); ; {
			var value T
			err := in.Decode(&value)
			if errors.Is(err, io.EOF) || !yield(value, err) || err != nil {
				return
			}
		}
	}
}
