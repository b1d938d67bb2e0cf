package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/replicated/answer"
)

const (
	// dialTimeout bounds the connection to the owner.
	dialTimeout = 2 * time.Second
	// maxForwards is the number of places for requests to one owner in progress, each with a connection and
	// about 100 KB, or with a body in the stream. It is a quarter of the connections of a server: an owner that
	// does not answer leaves the others for the requests to other owners. Namespaces share the places. A request
	// without a known write key takes unknownPlaces of them, so that these requests have a small part together.
	maxForwards   = 1024
	unknownPlaces = 2
	// maxIdle bounds the connections to the owner that are kept, and idleTimeout how long. It also bounds the
	// goroutines of a stream that wait for a request.
	maxIdle     = 256
	bufferBytes = 4 << 10 // An answer to calls has less than 1 KB.
	idleTimeout = time.Minute
)

// ErrNoOwner reports that no owner is known, or that the process no longer owns the slot.
var ErrNoOwner = errors.New("no owner of the slot is known")

// ErrBusy reports that the requests of a namespace have used up its share of the places or of the memory. The
// owner did not get the request.
var ErrBusy = errors.New("too many requests of this namespace, or without a known write key, wait for the owner of the slot")

// ErrTimeout reports that the owner did not read or answer the request in time. It may have handled it.
var ErrTimeout = errors.New("the owner of the slot did not answer in time")

// BodyError is an error of the connection to the client, as opposed to that to the owner.
type BodyError struct{ Err error }

func (e *BodyError) Error() string { return "read the request: " + e.Err.Error() }

func (e *BodyError) Unwrap() error { return e.Err }

// body marks the errors of a request's body. While the client sends, the time limit of the owner does
// not run.
type body struct {
	io.ReadCloser
	limit *timeLimit
}

func (b body) Read(p []byte) (int, error) {
	b.limit.pause()
	n, err := b.ReadCloser.Read(p)
	b.limit.resume(n)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &BodyError{err}
	}
	return n, err
}

// answerBody is an owner's answer. It ends with an error after the request has ended: the owner can then
// end an answer that it has not completed.
type answerBody struct {
	io.ReadCloser
	request context.Context
}

func (b answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) && b.request.Err() != nil {
		err = context.Cause(b.request)
	}
	return n, err
}

// Connections are a process's connections to the owners of its slots. Forwarders whose slots have the same
// owner share them, and the places of requests in progress.
type Connections struct {
	// Memory bounds the bodies of the calls and their answers. It is required.
	Memory *limits.Pool
	// Dial opens the connections; TCP if it is nil.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	keys knownKeys

	mu sync.Mutex
	// to has the connections by the announcement of the owner.
	to map[string]*connections
}

// connections are those to one owner.
type connections struct {
	transport *http.Transport
	// users is the number of Forwarders; Connections.mu guards it.
	users int
	// places are the places of the requests in progress.
	places limits.Pool

	mu      sync.Mutex
	current *stream
	unused  bool // It has no users, and gets none.
}

// use returns the connections to the owner with an announcement. Each call is followed by one of release.
func (c *Connections) use(announcement []byte, pool *x509.CertPool) *connections {
	c.mu.Lock()
	defer c.mu.Unlock()
	to := c.to[string(announcement)]
	if to == nil {
		dial := c.Dial
		if dial == nil {
			dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
		}
		to = &connections{places: limits.Pool{Max: maxForwards}, transport: &http.Transport{
			DialContext:         dial,
			TLSHandshakeTimeout: dialTimeout,
			TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: serverName},
			MaxIdleConnsPerHost: maxIdle,
			IdleConnTimeout:     idleTimeout,
			DisableCompression:  true,
		}}
		if c.to == nil {
			c.to = map[string]*connections{}
		}
		c.to[string(announcement)] = to
	}
	to.users++
	return to
}

// release closes the connections to an owner that no Forwarder uses any more.
func (c *Connections) release(announcement []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	to := c.to[string(announcement)]
	if to.users--; to.users == 0 {
		delete(c.to, string(announcement))
		to.endStream()
		to.transport.CloseIdleConnections()
	}
}

// Forwarder sends requests to the owner.
type Forwarder struct {
	// Refuse answers a call that the owner did not answer. The error wraps a *BodyError if the
	// client caused it. With any other the client should send the call again: the owner may have
	// handled it.
	Refuse func(w http.ResponseWriter, err error)
	Logger *slog.Logger
	// Connections are shared with the Forwarders of other slots. They are required.
	Connections *Connections
	// Slot is the slot of the requests; see TakeSlot.
	Slot string

	buffers          buffers
	owner            atomic.Pointer[owner]
	answered, failed atomic.Int64
}

// buffers are for the bodies of answers. Without them, each answer allocates 32 KB.
type buffers struct{ sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.Pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, bufferBytes)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.Pool.Put(&p) }

// owner is the present owner as it announced itself.
type owner struct {
	text []byte
	Announcement
	proxy http.Handler
	*connections
	// replaced ends the requests to this owner.
	replaced context.Context
	stop     context.CancelFunc
}

// SetOwner sets the owner from its announcement in the log; nil if the slot has none. Requests to the
// previous one are cancelled.
func (f *Forwarder) SetOwner(announcement []byte) {
	before := f.owner.Load()
	if before != nil && bytes.Equal(before.text, announcement) {
		return
	}
	var next *owner
	if len(announcement) > 0 {
		a, pool, err := decode(announcement)
		if err != nil {
			f.Logger.Warn("requests cannot be forwarded to the owner", "error", err)
		} else {
			next = f.newOwner(announcement, a, pool)
		}
	}
	f.owner.Store(next)
	if before != nil {
		before.stop()
		f.Connections.release(before.text)
	}
}

// Owner describes the owner for messages; "" if none is known.
func (f *Forwarder) Owner() string {
	if o := f.owner.Load(); o != nil {
		return o.String()
	}
	return ""
}

// Answered returns the number of requests that owners have answered.
func (f *Forwarder) Answered() int64 { return f.answered.Load() }

// Failed returns the number of requests that were refused because no owner answered.
func (f *Forwarder) Failed() int64 { return f.failed.Load() }

func (f *Forwarder) newOwner(text []byte, a Announcement, pool *x509.CertPool) *owner {
	o := &owner{text: text, Announcement: a, connections: f.Connections.use(text, pool)}
	o.replaced, o.stop = context.WithCancel(context.Background())
	target := &url.URL{Scheme: "https", Host: a.Address}
	o.proxy = &httputil.ReverseProxy{
		Transport:  o.connections.transport,
		BufferPool: &f.buffers,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			p.Out.Host = p.In.Host
			for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if values := p.In.Header.Values(name); values != nil {
					p.Out.Header[name] = values
				}
			}
			p.Out.Header.Set(tokenHeader, a.Token)
			f.mark(p.Out.Header, p.In, kindOf(p.In).admin)
			f.Connections.keys.ask(p.Out.Header, kindOf(p.In).key)
		},
		ModifyResponse: func(r *http.Response) error {
			if r.StatusCode == http.StatusMisdirectedRequest {
				return ErrNoOwner
			}
			if err := context.Cause(r.Request.Context()); err != nil {
				return err
			}
			if k := kindOf(r.Request); k.admin {
				k.limit.stop() // The answer may have no end.
			} else {
				f.answered.Add(1)
			}
			f.Connections.keys.learn(r.Header, kindOf(r.Request).key)
			r.Body = answerBody{r.Body, r.Request.Context()}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if context.Cause(r.Context()) == ErrTimeout { //nolint:errorlint // It is the cause itself.
				err = ErrTimeout
			}
			f.Logger.Debug("forwarding a request to the owner failed", "owner", a, "error", err)
			kindOf(r).refuse(w, err)
		},
		ErrorLog: log.New(proxyLog{f.Logger}, "", 0),
	}
	return o
}

// proxyLog logs the messages of the proxy: responses that ended early.
type proxyLog struct{ to *slog.Logger }

func (l proxyLog) Write(line []byte) (int, error) {
	l.to.Debug("forwarding a request to the owner failed", "error", string(bytes.TrimSpace(line)))
	return len(line), nil
}

// mark adds the client of a request in, its kind and the slot to the header that is sent, in place of values
// of the client with these names.
func (f *Forwarder) mark(out http.Header, in *http.Request, admin bool) {
	out.Set(clientHeader, in.RemoteAddr)
	delete(out, adminHeader)
	delete(out, streamHeader)
	delete(out, keyHeader)
	if admin {
		out.Set(adminHeader, "1")
	}
	if f.Slot != "" {
		out.Set(slotHeader, f.Slot)
	}
}

// kind is the kind of a request in progress, with its limit.
type kind struct {
	// admin is true for a request to the admin API.
	admin bool
	// key is the write key of a call, as far as it is known.
	key string
	// refuse answers the request without the owner.
	refuse func(w http.ResponseWriter, err error)
	limit  *timeLimit
}

type kindKey struct{}

// kindOf returns the kind of a request that is forwarded.
func kindOf(r *http.Request) *kind {
	k, _ := r.Context().Value(kindKey{}).(*kind)
	return k
}

// ServeHTTP sends a call to the owner, and its answer to the client. The call takes a place when its body has
// arrived, and leaves it before the answer is written: a slow client occupies none.
func (f *Forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o := f.owner.Load()
	if o == nil {
		f.refuse(w, ErrNoOwner)
		return
	}
	key, inBody := ingest.WriteKey(r)
	namespace := f.Connections.keys.namespace(key)
	memory := f.Connections.Memory.For(namespace)
	defer memory.Release()
	var body []byte
	whole := r.ContentLength <= event.MaxBodyBytes
	if whole {
		var err error
		body, err = limits.ReadBody(r.Body, &memory, r.ContentLength, event.MaxBodyBytes+1)
		switch {
		case errors.Is(err, limits.ErrNoMemory):
			f.refuse(w, ErrBusy)
			return
		case err != nil:
			f.refuse(w, &BodyError{err})
			return
		}
		whole = len(body) <= event.MaxBodyBytes
	}
	if inBody && len(body) <= streamedBytes && r.Header.Get("Content-Encoding") == "" {
		key = ingest.WriteKeyInBody(r, body)
		namespace = f.Connections.keys.namespace(key)
	}
	place, ok := o.enter(namespace, "")
	if !ok {
		f.refuse(w, ErrBusy)
		return
	}
	defer place.Release()
	var a answer.Writer
	if whole && inStream(r, body) {
		f.sendStreamed(&a, r, o, body, key)
	} else {
		// The owner refuses the size of a body that is too large, whatever its rest is.
		r = r.Clone(r.Context())
		r.Body = readAgain{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
		if whole {
			r.ContentLength, r.TransferEncoding = int64(len(body)), nil
		}
		f.serve(&a, r, o, &kind{key: key, refuse: f.refuse}, CallLimit)
	}
	place.Release()
	if !memory.Replace(namespace, int64(len(a.Body()))) {
		f.refuse(w, ErrBusy)
		return
	}
	maps.Copy(w.Header(), a.Header())
	w.WriteHeader(a.Status())
	_, _ = w.Write(a.Body())
}

// readAgain is a body of which a part was read.
type readAgain struct {
	io.Reader
	io.Closer
}

// Limited returns a handler that sends calls to the owner with a time limit other than CallLimit, and
// their answers to the clients as they arrive. Their bodies can be long: each occupies a place from the begin.
func (f *Forwarder) Limited(limit time.Duration) http.Handler {
	return f.served("/limited", func() *kind { return &kind{refuse: f.refuse} }, limit)
}

// Admin returns a handler that sends requests to the admin API of the owner, which authorizes them, and
// answers to the clients as they arrive. An answer must begin within AdminLimit. refuse answers a request
// that the owner did not answer; it may have handled it, except for ErrNoOwner and ErrBusy.
func (f *Forwarder) Admin(refuse func(w http.ResponseWriter, err error)) http.Handler {
	return f.served("/admin", func() *kind { return &kind{admin: true, refuse: refuse} }, AdminLimit)
}

// served returns a handler of requests of a kind, none of which is in a stream. They share no places with
// other calls of their namespace.
func (f *Forwarder) served(group string, newKind func() *kind, limit time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		k := newKind()
		o := f.owner.Load()
		if o == nil {
			k.refuse(w, ErrNoOwner)
			return
		}
		namespace := "admin"
		if !k.admin {
			k.key, _ = ingest.WriteKey(r)
			namespace = f.Connections.keys.namespace(k.key)
		}
		place, ok := o.enter(namespace, group)
		if !ok {
			k.refuse(w, ErrBusy)
			return
		}
		defer place.Release()
		f.serve(w, r, o, k, limit)
	})
}

// enter takes a place for a request of a namespace, "" if it is unknown. Each group of requests other than calls
// has an account of its own.
func (c *connections) enter(namespace, group string) (place limits.Reservation, ok bool) {
	place = c.places.For(namespace + group)
	if namespace == "" {
		return place, place.Grow(unknownPlaces)
	}
	return place, place.Grow(1)
}

// serve sends a request to the owner as an HTTP request, and its answer to the client as it arrives.
func (f *Forwarder) serve(w http.ResponseWriter, r *http.Request, o *owner, k *kind, limit time.Duration) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(o.replaced, func() { cancel(ErrNoOwner) })()
	k.limit = newTimeLimit(limit, func() { cancel(ErrTimeout) })
	defer k.limit.stop()
	// On a copy, because the server checks on its own Request whether the body was read.
	r = r.WithContext(context.WithValue(ctx, kindKey{}, k))
	if r.Body != http.NoBody {
		r.Body = body{r.Body, k.limit}
	}
	o.proxy.ServeHTTP(w, r)
}

// refuse answers a call that was not sent.
func (f *Forwarder) refuse(w http.ResponseWriter, err error) {
	f.failed.Add(1)
	f.Refuse(w, err)
}
