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

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

const (
	// DefaultIdleTimeout is the longest pause of a sync's sender.
	DefaultIdleTimeout = time.Minute
	// answerTimeout bounds how long a client may take to read a response.
	answerTimeout = 30 * time.Second
	// SyncPath is the pattern of the paths of syncs.
	SyncPath = "/v1/audiences/{key}/members"
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
	mux.Handle(SyncPath, s)
	mux.HandleFunc("/v1/audiences/", func(w http.ResponseWriter, _ *http.Request) {
		admission.Refuse(http.StatusNotFound, admission.CodeNotFound, "unknown path; send members to /v1/audiences/KEY/members").Write(w)
	})
}

// ServeHTTP answers a sync, or a request for the progress of the last one.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodPut && r.Method != http.MethodPost && r.Method != http.MethodGet {
		w.Header().Set("Allow", "GET, PUT, POST")
		admission.Refuse(http.StatusMethodNotAllowed, admission.CodeMethod, "use PUT to send all members, POST to send an increment, GET to read the progress of the last sync").Write(w)
		return
	}
	q, bad := s.request(r)
	if bad != nil {
		if bad.Status == http.StatusUnauthorized {
			w.Header().Set("Www-Authenticate", `Basic realm="posthorn"`)
		}
		bad.Write(w)
		return
	}
	control := http.NewResponseController(w)
	r = WithoutDeadline(w, r, s.IdleTimeout)
	if s.proxy != nil {
		if r.Header.Get(hopHeader) != "" {
			admission.Refuse(http.StatusMisdirectedRequest, "not_the_owner", "another pod forwarded this sync to a pod that does not own it; check --audience-owner of the dispatchers").Write(w)
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
			adminapi.SyncProgress
		}{true, s.Progress(q.Namespace, q.Audience)})
		return
	}
	body, bad := decoded(r)
	if bad != nil {
		bad.Write(w)
		return
	}
	result, err := s.Sync(r.Context(), q, body)
	_ = control.SetWriteDeadline(time.Now().Add(answerTimeout))
	if err != nil {
		s.refusal(err).Write(w)
		return
	}
	status := http.StatusOK
	if !result.Sent && !q.DryRun {
		status = http.StatusAccepted
	}
	writeJSON(w, status, struct {
		Success bool `json:"success"`
		adminapi.SyncResult
	}{true, result})
}

// WithoutDeadline returns a request that may take longer than the server's timeouts, which are for
// calls, while data arrives: the longest pause of its sender is idle.
func WithoutDeadline(w http.ResponseWriter, r *http.Request, idle time.Duration) *http.Request {
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Time{})
	// On a copy, because the server checks on its own Request whether the body was read.
	r = r.WithContext(r.Context())
	r.Body = &deadlineBody{ReadCloser: r.Body, control: control, idle: idle}
	return r
}

// authenticate finds the Source of a request. A refusal counts for the Source, as for calls.
func (s *Service) authenticate(r *http.Request) (view *liveconfig.View, ref liveconfig.SourceRef, bad *admission.Refusal) {
	source := s.Gate.Unidentified
	defer func() {
		if bad != nil {
			s.Gate.Reject(source, s.Now(), 1, bad.Code, bad.Message)
		}
	}()
	if view = s.Gate.View(); view == nil {
		return nil, ref, admission.NotReady()
	}
	key := admission.WriteKey(r.Header)
	if key == "" {
		return nil, ref, admission.Refuse(http.StatusUnauthorized, admission.CodeNoWriteKey, "no write key; send it as HTTP Basic user name (curl -u KEY:)")
	}
	if ref, source, bad = s.Gate.Authenticate(view, key); bad == nil {
		bad = admission.CheckSuspended(ref.Source)
	} else if bad.Code == admission.CodeUnknownKey {
		address, _, _ := net.SplitHostPort(r.RemoteAddr) // "" without a port, which no server sets.
		s.Gate.UnknownKeys.Add(key, address, s.Now())
	}
	return view, ref, bad
}

// request authenticates the sender and parses the audience and the parameters.
func (s *Service) request(r *http.Request) (q Request, bad *admission.Refusal) {
	view, ref, bad := s.authenticate(r)
	if bad != nil {
		return q, bad
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
		return q, admission.Refusef(http.StatusNotFound, "unknown_audience", "the Source of this write key has no audience with this key; %s", hint)
	}
	q = Request{Namespace: ref.Namespace, Audience: config.Audiences[i], Full: r.Method == http.MethodPut,
		AllowRemoval: float64(config.Audiences[i].MaxRemovalPercent)}
	// Unknown parameters are rejected: a misspelled dry run would take effect.
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, admission.Refusef(http.StatusBadRequest, "invalid_parameter", "the query is malformed; write it like ?dryRun=true")
	}
	flags := map[string]*bool{"allowEmpty": &q.AllowEmpty, "resend": &q.Resend, "dryRun": &q.DryRun}
	for name, values := range query {
		flag := flags[name]
		switch {
		case flag == nil && name != "allowRemoval":
			return q, admission.Refusef(http.StatusBadRequest, "unknown_parameter", "unknown parameter; use allowRemoval, allowEmpty, resend or dryRun")
		case len(values) > 1:
			return q, admission.Refusef(http.StatusBadRequest, "invalid_parameter", "%s is set more than once; set it once", name)
		case flag != nil:
			if *flag, err = strconv.ParseBool(values[0]); err != nil {
				return q, admission.Refusef(http.StatusBadRequest, "invalid_parameter", "%s must be true or false, as in %[1]s=true", name)
			}
		default:
			if q.AllowRemoval, err = strconv.ParseFloat(values[0], 64); err != nil || math.IsNaN(q.AllowRemoval) || q.AllowRemoval < 0 ||
				q.AllowRemoval > 100 {
				return q, admission.Refusef(http.StatusBadRequest, "invalid_parameter", "allowRemoval must be a percentage from 0 to 100")
			}
		}
	}
	return q, nil
}

// decoded removes the body's content encoding.
func decoded(r *http.Request) (io.Reader, *admission.Refusal) {
	switch strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))) {
	case "", "identity":
		return r.Body, nil
	case "gzip", "x-gzip":
		return &inflated{in: counted{Reader: r.Body}}, nil
	}
	return nil, admission.Refusef(http.StatusUnsupportedMediaType, admission.CodeEncoding, "Content-Encoding must be gzip or absent; remove the header or compress the body with gzip")
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
			err = admission.Refusef(http.StatusBadRequest, admission.CodeUnreadable, "the body is not valid gzip, although Content-Encoding is gzip; compress the body or remove the header")
		}
		if err != nil {
			return 0, err
		}
		r.Reader = z
	}
	if r.n > ratioFrom && r.n > maxRatio*r.in.n {
		return 0, admission.Refusef(http.StatusRequestEntityTooLarge, "too_compressed", "the body inflates to more than %d times its size, which is not a list of members", maxRatio)
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

// refusal converts an error to a refusal.
func (s *Service) refusal(err error) *admission.Refusal {
	if r, ok := errors.AsType[*admission.Refusal](err); ok {
		return r
	}
	if errors.Is(err, errTooMuch) {
		return admission.Refusef(http.StatusRequestEntityTooLarge, "too_many_members", "the members need more than %d bytes on disk; split the audience", s.MaxBytes)
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return admission.Refusef(http.StatusRequestTimeout, admission.CodeTooSlow, "no data arrived for %s; nothing was changed, send the sync again", s.IdleTimeout)
	}
	if broken, ok := errors.AsType[*bodyError](err); ok {
		return admission.Refusef(http.StatusBadRequest, admission.CodeUnreadable, "the body ended early (%v); nothing was changed, send the sync again", broken.Unwrap())
	}
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
		return admission.Refusef(http.StatusBadRequest, admission.CodeUnreadable, "the gzip data is damaged or truncated; nothing was changed, send the sync again")
	}
	if strings.HasPrefix(err.Error(), "flate: ") {
		return admission.Refusef(http.StatusBadRequest, admission.CodeUnreadable, "the gzip data is damaged; nothing was changed")
	}
	s.Logger.Error("sync failed", "error", err)
	return admission.Retry(10, admission.CodeStorageFailed, "the sync could not be stored; nothing was changed, send it again")
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
				s.refusal(err).Write(w)
				return
			}
			s.Logger.Warn("forwarding a sync to the pod that stores the audiences failed", "owner", target.Host, "error", err)
			admission.Retry(5, "owner_unreachable", "the dispatcher pod that stores the audiences did not answer; send the sync again").Write(w)
		},
	}, nil
}
