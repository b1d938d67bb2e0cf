// Package ingest accepts calls over HTTP in Segment's wire format. It has the Source authenticated,
// enforces the limits of package limits, and answers 200 only after every call of the request is
// durable. Package admission decides which requests may append, and appends. The main type is Handler.
package ingest

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Options configure a Handler. Gate is required.
type Options struct {
	// Gate is the way into the queue; the Handler uses its clock.
	Gate *admission.Gate
	// MaxBuffered bounds the memory of all requests in progress: their bodies, their messages, and
	// the copies that the store makes. Default 256 MiB. One Source gets at most half of it, and
	// less while other Sources need memory. A request beyond the limit is answered 503.
	MaxBuffered int64
	// TrustedProxies are the networks of trusted proxies, whose X-Forwarded-For is used; see
	// ParseProxies.
	TrustedProxies []netip.Prefix
	// PublicHost is the host of the tracking API, with an optional port, in the settings documents;
	// see CheckPublicHost. Empty: the Host header of the request.
	PublicHost string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Tracer makes a span per request; nil disables tracing.
	Tracer trace.Tracer
}

// Error codes in addition to the codes of packages event and admission.
const (
	codeOriginDenied    = "origin_not_allowed"
	codeRateLimited     = "rate_limited"
	codeMediaType       = "unsupported_media_type"
	codeInvalidHost     = "invalid_host"
	codeHeadTooLarge    = "headers_too_large"
	codeInternal        = "internal"
	maxRetryAfter       = 300
	defaultMaxBuffered  = 256 << 20
	corsMaxAge          = "7200"
	allowedHeaders      = "Authorization, Content-Encoding, Content-Type"
	allowedMethods      = "POST, OPTIONS"
	exposedHeaders      = admission.HeaderRetryAfter + ", " + admission.HeaderReset
	headerContentType   = "Content-Type"
	contentTypeJSON     = "application/json"
	headerAllowedOrigin = "Access-Control-Allow-Origin"
)

// paths maps a path to the type of its calls; the type is empty for batches.
var paths = map[string]event.Type{
	"/v1/identify": event.Identify, "/v1/track": event.Track, "/v1/page": event.Page,
	"/v1/screen": event.Screen, "/v1/group": event.Group, "/v1/alias": event.Alias,
	"/v1/batch": "", "/v1/import": "",
}

// short are the paths of the browser and mobile libraries.
var short = map[string]event.Type{
	"/v1/i": event.Identify, "/v1/t": event.Track, "/v1/p": event.Page,
	"/v1/s": event.Screen, "/v1/g": event.Group, "/v1/a": event.Alias, "/v1/b": "",
}

// isImport reports whether a path is for past calls, whose times are not corrected.
func isImport(path string) bool { return strings.TrimSuffix(path, "/") == "/v1/import" }

// maxTurn is how many units of filters a request may cost before it yields to the next request; it ends with a call,
// whose filters have a budget (expression.MaxCallCost). unitBytes is the charge for a unit: about the number of bytes
// that are parsed in its time.
const (
	maxTurn   = 10_000
	unitBytes = 64
)

//go:embed openapi.yaml
var openAPI []byte

// Handler serves the tracking API. Make it with New.
type Handler struct {
	Options
	metrics   metrics
	memory    limits.Pool
	scheduler *limits.Scheduler
	deadlines limits.Deadlines
	pace      limits.Pace

	origins atomic.Pointer[origins]
	faults  admission.Sampler // for the log of internal errors
}

// ParseProxies parses networks (CIDRs) and addresses of proxies.
func ParseProxies(entries []string) ([]netip.Prefix, error) {
	var list []netip.Prefix
	for _, entry := range entries {
		text := strings.TrimSpace(entry)
		prefix, err := netip.ParsePrefix(text)
		if addr, bad := netip.ParseAddr(text); bad == nil {
			prefix, err = addr.WithZone("").Prefix(addr.BitLen())
		}
		if err != nil {
			return nil, fmt.Errorf("%q is neither a network (10.0.0.0/8, fd00::/8) nor an address (10.1.2.3)", entry)
		}
		list = append(list, prefix.Masked())
	}
	return list, nil
}

// New makes a Handler.
func New(o Options) *Handler {
	if o.MaxBuffered <= 0 {
		o.MaxBuffered = defaultMaxBuffered
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	h := &Handler{Options: o}
	h.memory.Max = o.MaxBuffered
	h.metrics = newMetrics(o.Registerer, h.memory.Used)
	h.scheduler = limits.NewScheduler(2 * runtime.GOMAXPROCS(0)) // one request computes, the next one is ready
	return h
}

// NewServer makes an HTTP server for a handler, with a bound for every time and size. It serves
// HTTP/1.1 and HTTP/2, with TLS or in clear text behind a proxy. Package listen bounds its
// connections.
func NewServer(h http.Handler) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: h, Protocols: &protocols,
		ReadHeaderTimeout: 10 * time.Second,
		// A body of 500 KB arrives in time at 140 kbit/s.
		ReadTimeout: 30 * time.Second, WriteTimeout: 90 * time.Second, IdleTimeout: 3 * time.Minute,
		MaxHeaderBytes: maxReadHead,
		// Each connection keeps a buffer of the largest frame that it has received.
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 100, MaxReadFrameSize: 16 << 10},
	}
}

// request is the state of one HTTP request.
type request struct {
	*http.Request
	view *liveconfig.View
	ref  liveconfig.SourceRef
	// source is Gate.Unidentified until the write key is known.
	source *admission.Source
	origin string
	memory limits.Reservation
	turn   limits.Turn
	// bodyBytes is the size of the body; reading holds the parsed body.
	bodyBytes int
	reading   event.Reading
	storing   limits.Storing
	// calls is the number of calls that became messages, and defects counts those with each defect.
	calls   int
	defects admission.Defects
	// batchCalls is the number of calls of a refused batch, 0 while it is unknown. It is an estimate
	// if bodyCut.
	batchCalls int
	bodyCut    bool
	// span and the trace context for deliveries are zero while tracing is off.
	span        trace.Span
	traceParent string
}

// Mount adds the Handler. It serves every path that has no other handler; the paths of most calls are
// patterns of their own, because the mux finds these without an allocation.
func (h *Handler) Mount(mux *http.ServeMux) {
	mux.Handle("/", h)
	for path := range paths {
		mux.Handle(path, h)
	}
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := h.Gate.Now()
	header := w.Header()
	header["X-Content-Type-Options"] = nosniffHeader
	if r.URL.Path == "/openapi.yaml" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		header.Set(headerContentType, "application/yaml")
		_, _ = w.Write(openAPI)
		return
	}
	path := strings.TrimSuffix(r.URL.Path, "/")
	typ, known := typeOf(path)
	if !known {
		if key, ok := settingsKey(path); ok {
			h.settings(w, r, key)
			return
		}
		h.answer(w, unknownPath)
		return
	}
	q := request{Request: r, view: h.Gate.View(), source: h.Gate.Unidentified, origin: r.Header.Get("Origin")}
	q.memory = h.memory.For("")
	defer q.memory.Release() // A slow client can delay this until after the answer is written.
	if q.origin != "" {
		header.Add("Vary", "Origin")
		h.exposeToKnownOrigin(header, &q)
	}
	switch r.Method {
	case http.MethodOptions:
		if isCut(r) {
			h.refuseHead(w, &q, begin)
			return
		}
		h.preflight(w, &q, allowedMethods)
		return
	case http.MethodPost:
	default:
		header.Set("Allow", allowedMethods)
		h.answer(w, admission.Refuse(http.StatusMethodNotAllowed, admission.CodeMethod, "use POST to send calls"))
		return
	}
	if h.Tracer != nil {
		h.trace(&q, path, begin)
	}
	rejected, bad := h.recoverPanics(w, &q, typ, begin)
	if bad != nil {
		if isCut(r) { // Found while the Source was looked for.
			bad = headTooLarge
		}
		if bad.Status == http.StatusUnauthorized && q.origin == "" {
			// Browsers would ask their user for a password, so pages do not get this header.
			header.Set("Www-Authenticate", `Basic realm="posthorn"`)
		}
		message := bad.Message
		calls, estimated := q.refusedCalls(typ, bad)
		if estimated {
			message = fmt.Sprintf("%s (about %d calls, estimated by size)", message, calls)
		}
		h.Gate.Reject(q.source, begin, calls, bad.Code, message)
		h.answer(w, bad)
	} else {
		header[headerContentType] = jsonHeader
		_, _ = w.Write(success(rejected))
	}
	duration := h.metrics.succeeded
	if bad != nil {
		duration = h.metrics.duration.WithLabelValues(strconv.Itoa(bad.Status/100) + "xx")
	}
	duration.Observe(h.Gate.Now().Sub(begin).Seconds())
	if q.span != nil {
		q.endTrace(bad)
	}
}

// refuseHead answers a request without calls whose head was too large. The page does not send the call.
func (h *Handler) refuseHead(w http.ResponseWriter, q *request, now time.Time) {
	h.Gate.Reject(q.source, now, 1, headTooLarge.Code, headTooLarge.Message)
	h.answer(w, headTooLarge)
}

// Shared headers of every answer; they must not be modified.
var (
	jsonHeader    = []string{contentTypeJSON}
	nosniffHeader = []string{"nosniff"}
)

// recoverPanics limits a panic to the request that caused it.
func (h *Handler) recoverPanics(w http.ResponseWriter, q *request, typ event.Type, now time.Time) (rejected []event.Rejection,
	bad *admission.Refusal) {
	defer func() {
		if fault := recover(); fault != nil {
			if missed, ok := h.faults.Due(now); ok { // The panic's text may contain request data, so it is not logged.
				h.Logger.Error("request handler panicked", "namespace", q.source.Namespace, "source", q.source.Name, "type", fmt.Sprintf("%T", fault),
					"stack", string(debug.Stack()), "suppressed", missed)
			}
			bad = admission.Refuse(http.StatusInternalServerError, codeInternal, "internal error, see the log of Posthorn; send the request again")
		}
	}()
	return h.handle(w, q, typ, now)
}

// handle authenticates a request, then reads, parses, rate-limits and stores it.
func (h *Handler) handle(w http.ResponseWriter, q *request, typ event.Type, now time.Time) (rejected []event.Rejection,
	bad *admission.Refusal) {
	if q.view == nil {
		return nil, admission.NotReady()
	}
	// A key in the header is looked up before the body is read, so an unknown key costs little.
	if key := admission.WriteKey(q.Header); key != "" {
		if bad := h.authenticate(w, q, key); bad != nil {
			return nil, bad
		}
	}
	if t, _, _ := strings.Cut(q.Header.Get(headerContentType), ";"); t != "" && !takesMediaType(strings.ToLower(strings.TrimSpace(t))) {
		return nil, admission.Refuse(http.StatusUnsupportedMediaType, codeMediaType, "Content-Type must be application/json (text/plain is read as JSON, too)")
	}
	if q.source != h.Gate.Unidentified { // Skip the body if the Source is far over its rate.
		if bad := h.limit(q, 0, 0); bad != nil {
			return nil, bad
		}
	}
	body, bad := h.read(w, q)
	if bad != nil {
		return nil, bad
	}
	defer func() {
		q.turn.Leave(0)
		if bad != nil {
			h.pace.Worked(q.source.Limits, requestBytes+q.bodyBytes, q.turn.Used)
		}
		q.storing.Leave()
	}()
	if bad := h.parse(w, q, typ, now, body); bad != nil {
		return nil, bad
	}
	if isCut(q.Request) {
		q.reading.Release()
		return nil, headTooLarge
	}
	routing := h.Gate.Begin()
	defer routing.End()
	calls, rejected, unpaid, bad := h.readBatch(q, routing, typ)
	if bad != nil {
		q.turn.Leave(unpaid)
		return nil, bad
	}
	if bad := h.persist(q, routing, calls, unpaid, now); bad != nil {
		return nil, bad
	}
	if len(rejected) > 0 {
		h.countRejected(q, rejected, now)
	}
	return rejected, nil
}

// parse reads the calls of a body and reserves memory and a share of the Source's limits.MaxStoring
// for their messages. On success it returns within the request's turn, and the caller must release
// q.reading.
//
// The size of the messages is known only after the body is parsed. If they do not fit beside the
// Source's other requests, the request releases everything but the body, waits for its full share
// and parses the body again. So no request waits for another while it holds a part, and a waiting
// request is small.
func (h *Handler) parse(w http.ResponseWriter, q *request, typ event.Type, now time.Time, body *buffer) *admission.Refusal {
	defer body.release()
	parser := event.Request{Type: typ, Import: isImport(q.URL.Path), ReceivedAt: now, ClientIP: h.clientIP(q.Request),
		FromBrowser: q.origin != ""}
	q.bodyBytes = len(body.bytes)
	want := 2*q.bodyBytes + event.MessageOverhead
	for {
		if q.source != h.Gate.Unidentified && !q.storing.Enter(h.deadlines.Context(), q.source.Limits, want) {
			return busy
		}
		q.turn.Enter(h.scheduler, &q.source.Limits.Queue)
		if bad := h.readCalls(w, q, parser, body.bytes); bad != nil {
			q.turn.Leave(requestBytes + q.bodyBytes)
			return bad
		}
		want = q.reading.Bytes
		if q.storing.Extend(q.source.Limits, want) {
			if q.memory.Replace(q.source.Namespace, h.memoryFor(q)) {
				return nil
			}
			q.reading.Release()
			q.turn.Leave(requestBytes + q.bodyBytes)
			return busy
		}
		q.reading.Release()
		q.turn.Leave(requestBytes + q.bodyBytes)
		q.storing.Leave()
	}
}

// readCalls reads the calls into q.reading. If the header has no write key, it identifies the
// Source by the write key of the body.
func (h *Handler) readCalls(w http.ResponseWriter, q *request, parser event.Request, body []byte) *admission.Refusal {
	var err error
	q.reading, err = parser.Read(body)
	fault, _ := errors.AsType[*event.Error](err)
	if q.source == h.Gate.Unidentified && (fault == nil || q.reading.WriteKey != "") { // The key may be in the part that could not be read.
		if bad := h.authenticate(w, q, q.reading.WriteKey); bad != nil {
			if fault == nil {
				q.reading.Release()
			}
			return bad
		}
	}
	if fault != nil {
		q.countOf(body, int64(len(body)))
		return ofEvent(fault)
	}
	q.batchCalls = q.reading.Calls
	return nil
}

// Cost of a request in memory and turns, beyond the bytes of its messages.
const (
	// storeCopies is the number of copies that the store holds of a message until it is on disk: in
	// the commit's batch, in the memtable, and in the buffer of the write-ahead log.
	storeCopies = 3
	// callBytes is the overhead of a call beyond its message, and nameBytes the overhead of the name of a destination
	// that does not get it.
	callBytes = 512
	nameBytes = 16
	// requestBytes is the minimum charge of a request.
	requestBytes = 4 << 10
)

// memoryFor estimates the memory of a request until it is answered. A request above half of the
// limit is admitted when its Source has no other request.
func (h *Handler) memoryFor(q *request) int64 {
	total := headerBytes(q.Header) + (1+storeCopies)*q.reading.Bytes + callBytes*q.reading.Calls
	return min(int64(total), h.memory.Max/2)
}

// readBatch returns the calls of a request that may be stored, within the turn that parse started, and the cost of
// this turn that is not charged yet.
func (h *Handler) readBatch(q *request, routing admission.Routing, typ event.Type) (calls []event.Call, rejected []event.Rejection,
	unpaid int, bad *admission.Refusal) {
	defer q.reading.Release()
	batch, err := q.reading.Messages()
	made := 0
	for i := range batch.Calls {
		made += len(batch.Calls[i].Body)
	}
	unpaid = requestBytes + q.bodyBytes + made
	if fault, ok := errors.AsType[*event.Error](err); ok {
		return nil, nil, unpaid + q.reading.Bytes, ofEvent(fault)
	}
	// Rejected calls take memory in the answer.
	if n := rejectionBytes*min(len(batch.Rejected), event.MaxBatchCalls) + 32*len(batch.Rejected); n > 0 && !q.memory.Grow(int64(n)) {
		return nil, nil, unpaid, busy
	}
	if bad := suppress(q, routing, typ, &batch); bad != nil {
		return nil, nil, unpaid, bad
	}
	if bad := h.limit(q, len(batch.Calls), made); bad != nil {
		return nil, nil, unpaid, bad
	}
	q.calls = len(batch.Calls)
	return batch.Calls, batch.Rejected, unpaid, nil
}

// maxCommitPart bounds the bytes of a request in one commit, because other requests wait for the
// commit.
const maxCommitPart = 256 << 10

// route makes the messages of the next commit, in turns, and leaves the last turn. bytes is their size, and names the
// part of it that the names of excluded destinations take.
func (h *Handler) route(q *request, routing admission.Routing, calls []event.Call, unpaid int, now time.Time) (part []queue.Message, bytes,
	names int) {
	spent := 0
	for i := range calls {
		if bytes+len(calls[i].Body) > maxCommitPart && i > 0 {
			break
		}
		message, units := routing.Message(q.ref, q.source.Key(), &calls[i], now)
		message.TraceParent = q.traceParent
		q.defects.Add(calls[i].Defects)
		part = append(part, message)
		for _, name := range message.Skip {
			names += nameBytes + len(name)
			bytes += nameBytes + len(name)
		}
		bytes += len(message.Body)
		unpaid += units * unitBytes
		if spent += units; spent > maxTurn {
			q.turn.Leave(unpaid)
			spent, unpaid = 0, 0
			q.turn.Enter(h.scheduler, &q.source.Limits.Queue)
		}
	}
	q.turn.Leave(unpaid)
	return part, bytes, names
}

// suppress removes the calls of users whose deletion request suppresses them.
func suppress(q *request, routing admission.Routing, typ event.Type, batch *event.Batch) *admission.Refusal {
	const message = "a deletion request suppresses this user; calls are accepted again after it is removed"
	if !slices.ContainsFunc(batch.Calls, func(c event.Call) bool { return routing.Suppressed(q.ref, &c) }) {
		return nil
	}
	if typ != "" {
		bad := admission.Refuse(http.StatusForbidden, admission.CodeSuppressed, message)
		bad.Calls = 1
		return bad
	}
	calls, indexes := batch.Calls[:0], batch.Indexes[:0]
	for i, c := range batch.Calls {
		if routing.Suppressed(q.ref, &c) {
			batch.Rejected = append(batch.Rejected, event.Rejection{Index: batch.Indexes[i],
				Err: &event.Error{Code: admission.CodeSuppressed, Message: message}})
			continue
		}
		calls, indexes = append(calls, c), append(indexes, batch.Indexes[i])
	}
	batch.Calls, batch.Indexes = calls, indexes
	slices.SortFunc(batch.Rejected, func(a, b event.Rejection) int { return a.Index - b.Index })
	return nil
}

// bytesPerCall is how many message bytes count as one call of a Source's rate.
const bytesPerCall = 4 << 10

// limit charges a request to its Source's rate: its calls, or one call per bytesPerCall of its
// messages if that is more. With calls = 0 it charges nothing, and refuses only if a single call
// would have to wait more than a second.
func (h *Handler) limit(q *request, calls, bytes int) *admission.Refusal {
	wait := h.Gate.TakeCalls(q.ref, q.source, max(calls, (bytes+bytesPerCall-1)/bytesPerCall))
	if wait <= 0 || calls == 0 && wait <= time.Second {
		return nil
	}
	seconds := int(math.Ceil(min(wait.Seconds(), maxRetryAfter)))
	bad := admission.Refusef(http.StatusTooManyRequests, codeRateLimited, "the Source is over its limit of %d calls a second (spec.rateLimit; every %d bytes of messages count as at least one call); send the request again later", q.ref.Source.CallsPerSecond, bytesPerCall)
	bad.RetryAfter, bad.Calls = max(1, seconds), calls
	return bad
}

// ofEvent makes a refusal from a parse error.
func ofEvent(fault *event.Error) *admission.Refusal {
	status := http.StatusBadRequest
	switch fault.Code {
	case event.CodeBodyTooLarge, event.CodeCallTooLarge, event.CodeBatchTooLarge:
		status = http.StatusRequestEntityTooLarge
	}
	return admission.Refuse(status, fault.Code, fault.Message)
}

// takesMediaType also accepts the types that sendBeacon and simple fetch requests send without a
// preflight.
func takesMediaType(t string) bool {
	return t == contentTypeJSON || t == "text/plain" || t == "application/x-www-form-urlencoded" || strings.HasSuffix(t, "+json")
}

// authenticate finds the Source of a write key and checks that the Source accepts calls from the
// request's origin.
func (h *Handler) authenticate(w http.ResponseWriter, q *request, key string) *admission.Refusal {
	if key == "" {
		return admission.Refuse(http.StatusUnauthorized, admission.CodeNoWriteKey, `no write key; send it as HTTP Basic user name or as "writeKey" in the body`)
	}
	ref, source, bad := h.Gate.Authenticate(q.view, key)
	if q.source = source; bad != nil {
		if bad.Code == admission.CodeUnknownKey {
			h.Gate.UnknownKeys.Add(key, clientText(h.clientIP(q.Request)), h.Gate.Now())
		}
		return bad
	}
	q.ref = ref
	q.memory.Move(q.source.Namespace) // If the body is read, its memory moves after the parse.
	if bad := allowPage(w, q); bad != nil {
		return bad
	}
	return admission.CheckSuspended(ref.Source)
}

func allowsOrigin(s liveconfig.Source, origin string) bool {
	for entry := range liveconfig.EntriesFor(origin) {
		if slices.Contains(s.AllowedOrigins, entry) {
			return true
		}
	}
	return false
}

// sameOrigin reports whether a page calls its own host, with a proxy in front of both, so the scheme
// of the request is unknown. Browsers need no permission for that.
func sameOrigin(r *http.Request, origin string) bool {
	canonical := liveconfig.CanonicalOrigin(origin)
	scheme, _, _ := strings.Cut(canonical, "://")
	return (scheme == "http" || scheme == "https") && canonical == liveconfig.CanonicalOrigin(scheme+"://"+r.Host)
}

// exposeTo lets a page of an origin read the answer. Posthorn uses no cookies, but sendBeacon
// always sends them, and the browser then requires that the answer allows credentials.
func exposeTo(header http.Header, origin string) {
	header.Set(headerAllowedOrigin, origin)
	header.Set("Access-Control-Allow-Credentials", "true")
	header.Set("Access-Control-Expose-Headers", exposedHeaders)
}

// preflight answers a browser's preflight request. It carries no write key, so an origin is allowed
// if some Source allows it; the Source of the call itself is checked later.
func (h *Handler) preflight(w http.ResponseWriter, q *request, methods string) {
	header := w.Header()
	header.Add("Vary", "Access-Control-Request-Method")
	header.Add("Vary", "Access-Control-Request-Headers")
	header.Set("Allow", methods)
	if header.Get(headerAllowedOrigin) != "" {
		headers := allowedHeaders
		// Allow all headers that libraries add; Posthorn ignores them.
		if asked := q.Header.Get("Access-Control-Request-Headers"); asked != "" && len(asked) <= 1024 {
			headers = asked
		}
		header.Set("Access-Control-Allow-Methods", methods)
		header.Set("Access-Control-Allow-Headers", headers)
		header.Set("Access-Control-Max-Age", corsMaxAge)
	}
	w.WriteHeader(http.StatusNoContent)
}

// clientIP is the client's address: the last one in X-Forwarded-For that was not added by a trusted
// proxy, or the peer's address. It is invalid if the peer's address is unknown.
func (h *Handler) clientIP(r *http.Request) netip.Addr {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	ip := peer.Addr().Unmap().WithZone("")
	if !h.trusts(ip) {
		return ip
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0 && h.trusts(ip); i-- {
		text := strings.TrimSpace(hops[i])
		hop, err := netip.ParseAddr(text)
		if err != nil {
			withPort, err := netip.ParseAddrPort(text)
			if err != nil {
				break
			}
			hop = withPort.Addr()
		}
		ip = hop.Unmap().WithZone("")
	}
	return ip
}

// clientText returns an address as text, or "" if it is invalid.
func clientText(ip netip.Addr) string {
	if !ip.IsValid() {
		return ""
	}
	return ip.String()
}

func (h *Handler) trusts(ip netip.Addr) bool {
	return slices.ContainsFunc(h.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// persist makes the messages of calls durable, in parts. It starts within the turn of parse. If the client disconnects
// during this time, the calls are stored anyway, and its retry is a duplicate.
func (h *Handler) persist(q *request, routing admission.Routing, calls []event.Call, unpaid int, now time.Time) *admission.Refusal {
	if len(calls) == 0 {
		q.turn.Leave(unpaid)
		return nil
	}
	var duplicates []bool
	var waited time.Duration
	reserved := callBytes // for the names of a part
	for rest := calls; len(rest) > 0; {
		part, bytes, names := h.route(q, routing, rest, unpaid, now)
		if more := names - reserved; more > 0 {
			if !q.memory.Grow(int64(storeCopies * more)) {
				return busy
			}
			reserved = names
		}
		started := time.Now()
		repeated, err := routing.Append(h.deadlines.Context(), part)
		took := time.Since(started)
		if err != nil {
			if len(rest) < len(calls) && errors.Is(err, queue.ErrFull) {
				q.source.StorageFull(now)
				err = errPartlyStored
			}
			bad := h.notStored(q, err, now)
			bad.Calls = len(calls)
			return bad
		}
		duplicates = append(duplicates, repeated...)
		waited += took
		h.pace.Worked(q.source.Limits, bytes, took)
		if rest = rest[len(part):]; len(rest) > 0 {
			unpaid = 0
			q.turn.Enter(h.scheduler, &q.source.Limits.Queue)
		}
	}
	h.metrics.durable.Observe(waited.Seconds())
	q.source.Accepted(now, len(calls), duplicates)
	h.Gate.CountDefects(q.source, q.defects)
	return nil
}

// errPartlyStored means that storage became full after the first part of a large request.
var errPartlyStored = errors.New("storage became full after a part of the request was stored")

// notStored returns the refusal for an error of the store.
func (h *Handler) notStored(q *request, err error, now time.Time) *admission.Refusal {
	bad, full, expected := admission.NotStored(err)
	if full {
		q.source.StorageFull(now)
	}
	if !expected {
		if missed, ok := h.faults.Due(now); ok {
			h.Logger.Error("storing calls failed", "namespace", q.source.Namespace, "source", q.source.Name, "error", err, "suppressed", missed)
		}
	}
	return bad
}

// answer writes a refusal.
func (h *Handler) answer(w http.ResponseWriter, r *admission.Refusal) {
	if r.Status == http.StatusRequestEntityTooLarge || r.Status == http.StatusRequestTimeout {
		w.Header().Set("Connection", "close") // Closing is cheaper than reading the rest of the body.
	}
	r.Write(w)
}

type answerError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// rejectionBytes is the memory of a rejected call in the answer.
const rejectionBytes = 512

var successBody = []byte(`{"success":true}` + "\n")

// success is the body of a 200, with the rejected calls of a batch.
func success(rejected []event.Rejection) []byte {
	if len(rejected) == 0 {
		return successBody
	}
	type rejection struct {
		Index int `json:"index"`
		answerError
	}
	// Bound the answer: a body that consists of commas would make an answer of many times its size.
	list := make([]rejection, min(len(rejected), event.MaxBatchCalls))
	for i := range list {
		list[i] = rejection{rejected[i].Index, answerError{rejected[i].Err.Code, rejected[i].Err.Message}}
	}
	body, _ := json.Marshal(struct {
		Success  bool        `json:"success"`
		Rejected []rejection `json:"rejected"`
	}{true, list})
	return append(body, '\n')
}
