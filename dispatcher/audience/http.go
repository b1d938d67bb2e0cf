package audience

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// DefaultIdleTimeout is the longest pause of a sync's sender.
	DefaultIdleTimeout = time.Minute
	// answerTimeout bounds how long a client may take to read a response.
	answerTimeout = 30 * time.Second
	// hopHeader marks requests that another pod has forwarded.
	hopHeader = "X-Posthorn-Handed-On"
)

// Mount adds the paths of syncs:
//
//	PUT  /v1/audiences/{key}/members   a snapshot: all members
//	POST /v1/audiences/{key}/members   an increment: users to add, remove or change
//	GET  /v1/audiences/{key}/members   the progress of the last sync
//
// The write key of the audience's Source, as HTTP Basic user name, authenticates
// the sender. The body has one JSON object per line, plain or gzip.
func (s *Service) Mount(mux *http.ServeMux) {
	mux.Handle("/v1/audiences/{key}/members", s)
	mux.HandleFunc("/v1/audiences/", func(w http.ResponseWriter, _ *http.Request) {
		answerRefusal(w, refuse(http.StatusNotFound, "not_found", "unknown path; send members to /v1/audiences/KEY/members"))
	})
}

// ServeHTTP answers a sync, or a request for the progress of the last one.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodPut && r.Method != http.MethodPost && r.Method != http.MethodGet {
		w.Header().Set("Allow", "GET, PUT, POST")
		answerRefusal(w, refuse(http.StatusMethodNotAllowed, "method_not_allowed", "use PUT to send all members, POST to send an increment, GET to read the progress of the last sync"))
		return
	}
	q, bad := s.request(r)
	if bad != nil {
		if bad.Status == http.StatusUnauthorized {
			w.Header().Set("Www-Authenticate", `Basic realm="posthorn"`)
		}
		answerRefusal(w, bad)
		return
	}
	control := http.NewResponseController(w)
	// The server's timeouts are for calls; a sync may take longer while data arrives.
	_ = control.SetWriteDeadline(time.Time{})
	// On a copy, because the server checks on its own Request whether the body was read.
	r = r.WithContext(r.Context())
	r.Body = &deadlineBody{ReadCloser: r.Body, control: control, idle: s.IdleTimeout}
	if s.proxy != nil {
		if r.Header.Get(hopHeader) != "" {
			answerRefusal(w, refuse(http.StatusMisdirectedRequest, "not_the_owner", "another pod forwarded this sync to a pod that does not own it; check --audience-owner of the dispatchers"))
			return
		}
		// An interrupted body is reported as such; at about the same time the request's context is
		// cancelled, too.
		ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
		defer cancel()
		s.proxy.ServeHTTP(w, r.WithContext(ctx))
		return
	}
	if r.Method == http.MethodGet {
		writeJSON(w, http.StatusOK, struct {
			Success bool `json:"success"`
			Progress
		}{true, s.Progress(q.Namespace, q.Audience)})
		return
	}
	body, bad := decoded(r)
	if bad != nil {
		answerRefusal(w, bad)
		return
	}
	result, err := s.Sync(r.Context(), q, body)
	_ = control.SetWriteDeadline(time.Now().Add(answerTimeout))
	if err != nil {
		answerRefusal(w, s.refusal(err))
		return
	}
	status := http.StatusOK
	if !result.Sent && !q.DryRun {
		status = http.StatusAccepted
	}
	writeJSON(w, status, struct {
		Success bool `json:"success"`
		Result
	}{true, result})
}

// request authenticates the sender and parses the audience and the parameters.
func (s *Service) request(r *http.Request) (q Request, bad *Refusal) {
	view := s.View()
	if view == nil {
		return q, &Refusal{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: "Posthorn waits for its first config; send the request again", RetryAfter: 1}
	}
	key, _, ok := r.BasicAuth()
	if !ok || key == "" {
		return q, refuse(http.StatusUnauthorized, "no_write_key", "no write key; send it as HTTP Basic user name (curl -u KEY:)")
	}
	ref, ok := view.SourceByWriteKey(key)
	if !ok {
		if removed, ok := view.RemovedWriteKey(key, time.Now()); ok {
			return q, &Refusal{Status: http.StatusServiceUnavailable, Code: "write_key_removed", Message: removed.Reason, RetryAfter: 10}
		}
	}
	switch {
	case !ok && !view.Complete():
		return q, &Refusal{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: "some Sources are not loaded yet; send the request again", RetryAfter: 1}
	case !ok:
		return q, refuse(http.StatusUnauthorized, "unknown_write_key", "no accepted Source has this write key; compare it with the Source's Secret")
	case !ref.Source.Enabled:
		return q, refuse(http.StatusForbidden, "source_disabled", "the Source is disabled; set spec.enabled to true")
	}
	config, _ := view.Namespace(ref.Namespace)
	wanted := r.PathValue("key")
	i := slices.IndexFunc(config.Audiences, func(a liveconfig.Audience) bool {
		return a.Source == ref.Source.Name && a.Key == wanted && wanted != ""
	})
	if i < 0 {
		hint := "see the status of the Audience for its key"
		for _, a := range config.Audiences {
			if a.Source == ref.Source.Name && a.Name == wanted && a.Key != "" {
				hint = fmt.Sprintf("the key of the Audience %s is %s", a.Name, a.Key)
			}
		}
		return q, refuse(http.StatusNotFound, "unknown_audience", "the Source of this write key has no audience with this key; %s", hint)
	}
	q = Request{Namespace: ref.Namespace, Audience: config.Audiences[i], Full: r.Method == http.MethodPut, AllowRemoval: float64(config.Audiences[i].MaxRemovalPercent)}
	// Unknown parameters are rejected: a misspelled dry run would take effect.
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, refuse(http.StatusBadRequest, "invalid_parameter", "the query is malformed; write it like ?dryRun=true")
	}
	flags := map[string]*bool{"allowEmpty": &q.AllowEmpty, "resend": &q.Resend, "dryRun": &q.DryRun}
	for name, values := range query {
		flag := flags[name]
		switch {
		case flag == nil && name != "allowRemoval":
			return q, refuse(http.StatusBadRequest, "unknown_parameter", "unknown parameter; use allowRemoval, allowEmpty, resend or dryRun")
		case len(values) > 1:
			return q, refuse(http.StatusBadRequest, "invalid_parameter", "%s is set more than once; set it once", name)
		case flag != nil:
			if *flag, err = strconv.ParseBool(values[0]); err != nil {
				return q, refuse(http.StatusBadRequest, "invalid_parameter", "%s must be true or false, as in %[1]s=true", name)
			}
		default:
			if q.AllowRemoval, err = strconv.ParseFloat(values[0], 64); err != nil || math.IsNaN(q.AllowRemoval) || q.AllowRemoval < 0 || q.AllowRemoval > 100 {
				return q, refuse(http.StatusBadRequest, "invalid_parameter", "allowRemoval must be a percentage from 0 to 100")
			}
		}
	}
	return q, nil
}

// decoded removes the body's content encoding.
func decoded(r *http.Request) (io.Reader, *Refusal) {
	switch strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))) {
	case "", "identity":
		return r.Body, nil
	case "gzip", "x-gzip":
		return &inflated{in: counted{Reader: r.Body}}, nil
	}
	return nil, refuse(http.StatusUnsupportedMediaType, "unsupported_encoding", "Content-Encoding must be gzip or absent; remove the header or compress the body with gzip")
}

const (
	// maxRatio bounds the ratio of a body's size to its compressed size after ratioFrom bytes.
	// Lists of members shrink to a fifth or a twentieth.
	maxRatio  = 200
	ratioFrom = 16 << 20
)

// inflated is a gzip body with protection against decompression bombs. It reads nothing before the
// first Read.
type inflated struct {
	counted
	in counted
}

func (r *inflated) Read(p []byte) (int, error) {
	if r.Reader == nil {
		z, err := gzip.NewReader(&r.in)
		if errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.EOF) {
			err = refuse(http.StatusBadRequest, "unreadable_body", "the body is not valid gzip, although Content-Encoding is gzip; compress the body or remove the header")
		}
		if err != nil {
			return 0, err
		}
		r.Reader = z
	}
	if r.n > ratioFrom && r.n > maxRatio*r.in.n {
		return 0, refuse(http.StatusRequestEntityTooLarge, "too_compressed", "the body inflates to more than %d times its size, which is not a list of members", maxRatio)
	}
	return r.counted.Read(p)
}

type counted struct {
	io.Reader
	n int64
}

func (r *counted) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += int64(n)
	return n, err
}

// refusal converts an error to a Refusal.
func (s *Service) refusal(err error) *Refusal {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r
	}
	if errors.Is(err, errTooMuch) {
		return refuse(http.StatusRequestEntityTooLarge, "too_many_members", "the members need more than %d bytes on disk; split the audience", s.MaxBytes)
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return refuse(http.StatusRequestTimeout, "body_too_slow", "no data arrived for %s; nothing was changed, send the sync again", s.IdleTimeout)
	}
	if broken, ok := errors.AsType[*bodyError](err); ok {
		return refuse(http.StatusBadRequest, "unreadable_body", "the body ended early (%v); nothing was changed, send the sync again", broken.Unwrap())
	}
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
		return refuse(http.StatusBadRequest, "unreadable_body", "the gzip data is damaged or truncated; nothing was changed, send the sync again")
	}
	if strings.HasPrefix(err.Error(), "flate: ") {
		return refuse(http.StatusBadRequest, "unreadable_body", "the gzip data is damaged; nothing was changed")
	}
	s.Logger.Error("sync failed", "error", err)
	return &Refusal{Status: http.StatusServiceUnavailable, Code: "storage_failed", Message: "the sync could not be stored; nothing was changed, send it again", RetryAfter: 10}
}

// deadlineBody extends the read deadline with every byte that arrives.
type deadlineBody struct {
	io.ReadCloser
	control *http.ResponseController
	idle    time.Duration
	set     time.Time
}

// bodyError is an error of the connection, as opposed to one of storage.
type bodyError struct{ error }

func (e *bodyError) Unwrap() error { return e.error }

func (b *deadlineBody) Read(p []byte) (int, error) {
	if now := time.Now(); now.Sub(b.set) > b.idle/60 {
		b.set = now
		_ = b.control.SetReadDeadline(now.Add(b.idle))
	}
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		// After the body's end a deadline would look like a disconnected client.
		_ = b.control.SetReadDeadline(time.Time{})
	case err != nil:
		err = &bodyError{err}
	}
	return n, err
}

func answerRefusal(w http.ResponseWriter, r *Refusal) {
	if r.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(r.RetryAfter))
	}
	writeJSON(w, r.Status, struct {
		Success bool     `json:"success"`
		Error   *Refusal `json:"error"`
	}{Error: r})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, _ := json.Marshal(v) // texts and numbers always marshal
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}

func quote(s string) []byte {
	text, _ := json.Marshal(s) // a string always marshals
	return text
}

// newProxy forwards syncs to the pod that stores the members.
func (s *Service) newProxy() (http.Handler, error) {
	target, err := url.Parse(s.Owner)
	if err != nil || target.Host == "" || target.Scheme != "http" && target.Scheme != "https" {
		return nil, fmt.Errorf("audiences: the owner %q is not an http or https URL", s.Owner)
	}
	transport := &http.Transport{
		DialContext:           (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
		ExpectContinueTimeout: 5 * time.Second,
		MaxIdleConnsPerHost:   4,
		IdleConnTimeout:       time.Minute,
		DisableCompression:    true,
	}
	return &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			p.Out.Header.Set(hopHeader, "1")
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if _, ok := errors.AsType[*bodyError](err); ok { // the sender's fault, not the owner's
				answerRefusal(w, s.refusal(err))
				return
			}
			s.Logger.Warn("forwarding a sync to the pod that stores the audiences failed", "owner", target.Host, "error", err)
			bad := refuse(http.StatusServiceUnavailable, "owner_unreachable", "the dispatcher pod that stores the audiences did not answer; send the sync again")
			bad.RetryAfter = 5
			answerRefusal(w, bad)
		},
	}, nil
}
