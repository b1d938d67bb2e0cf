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
	// DefaultIdleTimeout is how long a sync may send nothing.
	DefaultIdleTimeout = time.Minute
	// answerTimeout is how long an answer may take to be read.
	answerTimeout = 30 * time.Second
	// hopHeader marks what another pod handed on.
	hopHeader = "X-Posthorn-Handed-On"
)

// Mount adds the paths of syncs:
//
//	PUT  /v1/audiences/{key}/members   a snapshot: all members
//	POST /v1/audiences/{key}/members   an increment: who joins, leaves, or has another value
//	GET  /v1/audiences/{key}/members   how far the last sync is
//
// The write key of the audience's Source, as HTTP Basic user name, says who
// sends. The body is one JSON object a line, plain or gzip.
func (s *Service) Mount(mux *http.ServeMux) {
	mux.Handle("/v1/audiences/{key}/members", s)
	mux.HandleFunc("/v1/audiences/", func(w http.ResponseWriter, _ *http.Request) {
		answerRefusal(w, refuse(http.StatusNotFound, "not_found", "there is nothing at this path; members go to /v1/audiences/KEY/members"))
	})
}

// ServeHTTP answers one sync, or a question about the last one.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodPut && r.Method != http.MethodPost && r.Method != http.MethodGet {
		w.Header().Set("Allow", "GET, PUT, POST")
		answerRefusal(w, refuse(http.StatusMethodNotAllowed, "method_not_allowed", "PUT sends all members, POST an increment, GET tells how far the last sync is"))
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
	// The server's limits are for calls; a sync may take long as long as it moves.
	_ = control.SetWriteDeadline(time.Time{})
	// In a copy: the server looks at the Body of its own, to see whether it was read.
	r = r.WithContext(r.Context())
	r.Body = &patientBody{ReadCloser: r.Body, control: control, idle: s.IdleTimeout}
	if s.proxy != nil {
		if r.Header.Get(hopHeader) != "" {
			answerRefusal(w, refuse(http.StatusMisdirectedRequest, "not_the_owner", "this pod was handed a sync that it does not own; the dispatchers disagree on the owner"))
			return
		}
		// A body that breaks off is told as that; the request's context ends as well then, a moment before or after.
		ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
		defer cancel()
		s.proxy.ServeHTTP(w, r.WithContext(ctx))
		return
	}
	if r.Method == http.MethodGet {
		writeJSON(w, http.StatusOK, struct {
			Success bool `json:"success"`
			Progress
		}{true, s.Progress(q.Tenant, q.Audience)})
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

// request finds out who sends, which audience is meant, and what is asked for.
func (s *Service) request(r *http.Request) (q Request, bad *Refusal) {
	view := s.View()
	if view == nil {
		return q, &Refusal{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: "waiting for the first config; send again", RetryAfter: 1}
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
		return q, &Refusal{Status: http.StatusServiceUnavailable, Code: "not_ready", Message: "some Sources are not loaded; send again", RetryAfter: 1}
	case !ok:
		return q, refuse(http.StatusUnauthorized, "unknown_write_key", "no Source has this write key; compare it with the Source's Secret")
	case !ref.Source.Enabled:
		return q, refuse(http.StatusForbidden, "source_disabled", "the Source is switched off; set spec.enabled to true")
	}
	config, _ := view.Tenant(ref.Tenant)
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
	q = Request{Tenant: ref.Tenant, Audience: config.Audiences[i], Full: r.Method == http.MethodPut, AllowRemoval: float64(config.Audiences[i].MaxRemovalPercent)}
	// What is not understood is refused: a sync that was meant as a dry run takes effect otherwise.
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, refuse(http.StatusBadRequest, "invalid_parameter", "the query cannot be read; it must look like ?dryRun=true")
	}
	flags := map[string]*bool{"allowEmpty": &q.AllowEmpty, "resend": &q.Resend, "dryRun": &q.DryRun}
	for name, values := range query {
		flag := flags[name]
		switch {
		case flag == nil && name != "allowRemoval":
			return q, refuse(http.StatusBadRequest, "unknown_parameter", "the parameters are allowRemoval, allowEmpty, resend and dryRun")
		case len(values) > 1:
			return q, refuse(http.StatusBadRequest, "invalid_parameter", "%s is given more than once", name)
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

// decoded undoes the body's content encoding.
func decoded(r *http.Request) (io.Reader, *Refusal) {
	switch strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))) {
	case "", "identity":
		return r.Body, nil
	case "gzip", "x-gzip":
		return &inflated{in: counted{Reader: r.Body}}, nil
	}
	return nil, refuse(http.StatusUnsupportedMediaType, "unsupported_encoding", "Content-Encoding must be gzip or absent")
}

const (
	// maxRatio is how many times its compressed size a body may have once
	// ratioFrom bytes of it were seen. Lists of members shrink to a fifth or a twentieth.
	maxRatio  = 200
	ratioFrom = 16 << 20
)

// inflated is a gzip body that is no bomb. Nothing of it is read before it is asked for.
type inflated struct {
	counted
	in counted
}

func (r *inflated) Read(p []byte) (int, error) {
	if r.Reader == nil {
		z, err := gzip.NewReader(&r.in)
		if errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.EOF) {
			err = refuse(http.StatusBadRequest, "unreadable_body", "the body is not gzip, as Content-Encoding says")
		}
		if err != nil {
			return 0, err
		}
		r.Reader = z
	}
	if r.n > ratioFrom && r.n > maxRatio*r.in.n {
		return 0, refuse(http.StatusRequestEntityTooLarge, "too_compressed", "the body inflates to more than %d times its size, which no list of members does", maxRatio)
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

// refusal makes an answer of an error.
func (s *Service) refusal(err error) *Refusal {
	if r, ok := errors.AsType[*Refusal](err); ok {
		return r
	}
	if errors.Is(err, errTooMuch) {
		return refuse(http.StatusRequestEntityTooLarge, "too_many_members", "the members take more than %d bytes on disk; split the audience", s.MaxBytes)
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return refuse(http.StatusRequestTimeout, "body_too_slow", "nothing came for %s; nothing was changed, send again", s.IdleTimeout)
	}
	if broken, ok := errors.AsType[*bodyError](err); ok {
		return refuse(http.StatusBadRequest, "unreadable_body", "the body could not be read to its end (%v); nothing was changed", broken.Unwrap())
	}
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
		return refuse(http.StatusBadRequest, "unreadable_body", "the gzip data is damaged or cut off; nothing was changed")
	}
	if strings.HasPrefix(err.Error(), "flate: ") {
		return refuse(http.StatusBadRequest, "unreadable_body", "the gzip data is damaged; nothing was changed")
	}
	s.Logger.Error("a sync failed", "error", err)
	return &Refusal{Status: http.StatusServiceUnavailable, Code: "storage_failed", Message: "the sync could not be stored; nothing was changed, send again", RetryAfter: 10}
}

// patientBody lets a body take its time as long as it moves.
type patientBody struct {
	io.ReadCloser
	control *http.ResponseController
	idle    time.Duration
	set     time.Time
}

// bodyError is a fault of the connection, as opposed to one of storage.
type bodyError struct{ error }

func (e *bodyError) Unwrap() error { return e.error }

func (b *patientBody) Read(p []byte) (int, error) {
	if now := time.Now(); now.Sub(b.set) > b.idle/60 {
		b.set = now
		_ = b.control.SetReadDeadline(now.Add(b.idle))
	}
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		// Nothing more is expected; a deadline would now look like a client that went away.
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

// newProxy hands syncs on to the pod that keeps the members.
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
			s.Logger.Warn("a sync could not be handed on to the pod that keeps the audiences", "owner", target.Host, "error", err)
			bad := refuse(http.StatusServiceUnavailable, "owner_unreachable", "the dispatcher pod that keeps the audiences did not answer; send again")
			bad.RetryAfter = 5
			answerRefusal(w, bad)
		},
	}, nil
}
