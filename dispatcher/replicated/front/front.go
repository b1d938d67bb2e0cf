// Package front finds the slot of a request, in a process of an installation with several slots:
//
//	request -> write key -> namespace (Index) -> slot (directory) -> the handler of the slot's owner
//
// It decides nothing about the request: the owner checks the key, the limits and the body, as without
// a front. The main types are Front and Index.
package front

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"net/http"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/replicated/answer"
)

// Front routes requests to the owners of their slots. Its fields are set before the first request.
type Front struct {
	// Ready returns why the configs or the directory are not read yet, or nil.
	Ready func() error
	Index *Index
	// SlotOf returns the slot of a namespace; ok is false while it has none.
	SlotOf func(namespace string) (slot int, ok bool)
	// Doubtful are the slots whose owners can know keys that no live config has: a config is lost or
	// refused, or the slot has no owner at the moment.
	Doubtful func() []int
	// Slot returns the handler of a slot's owner, in this process or in another one, and Any the handler of
	// any slot, for requests without a key.
	Slot func(slot int) http.Handler
	Any  func() http.Handler
	// Memory bounds the bodies that are read to find the key. Those of unknown keys share an account.
	Memory *limits.Pool
	// Unreadable answers a request whose body did not arrive.
	Unreadable func(w http.ResponseWriter, err error)
}

// busyRetryAfter is the Retry-After, in seconds, of a request whose body exceeds the free memory.
const busyRetryAfter = 2

// ServeHTTP sends a request to the owner of its slot.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.Ready() != nil {
		admission.NotReady().Write(w)
		return
	}
	if r.Method == http.MethodOptions { // A preflight has no key.
		if namespace, ok := f.Index.Allowing(r.Header.Get("Origin")); ok {
			f.serve(w, r, namespace)
			return
		}
	}
	key, inBody := ingest.WriteKey(r)
	if key != "" {
		if namespace, ok := f.Index.Namespace(key); ok {
			f.serve(w, r, namespace)
			return
		}
	}
	var doubtful []int
	if !inBody {
		if key != "" {
			doubtful = f.Doubtful()
		}
		if len(doubtful) == 0 {
			f.Any().ServeHTTP(w, r)
			return
		}
	}
	memory := f.Memory.For("")
	defer memory.Release()
	body, bad := f.read(r, &memory)
	switch {
	case bad != nil:
		bad(w)
		return
	case len(body) > event.MaxBodyBytes:
		f.Any().ServeHTTP(w, r) // It refuses the size.
		return
	}
	if inBody {
		key, ok := f.keyInBody(r, body)
		if !ok {
			refuseBusy(w)
			return
		}
		if namespace, ok := f.Index.Namespace(key); ok {
			f.serveRead(w, r, namespace, &memory, len(body))
			return
		}
		if doubtful = f.Doubtful(); len(doubtful) == 0 {
			f.Any().ServeHTTP(w, r)
			return
		}
	}
	f.ask(w, r, body, doubtful)
}

// keyInBody returns the write key in a body; ok is false without memory for it.
func (f *Front) keyInBody(r *http.Request, body []byte) (key string, ok bool) {
	inflated := f.Memory.For("")
	defer inflated.Release()
	if r.Header.Get("Content-Encoding") != "" && !inflated.Grow(2*event.MaxBodyBytes) { // Inflated, and parsed.
		return "", false
	}
	return ingest.WriteKeyInBody(r, body), true
}

// serveRead sends a request whose body of a size was read to the owner of a namespace's slot.
func (f *Front) serveRead(w http.ResponseWriter, r *http.Request, namespace string, memory *limits.Reservation, size int) {
	if !memory.Replace(namespace, int64(size)) {
		refuseBusy(w)
		return
	}
	f.serve(w, r, namespace)
}

// refuseBusy answers a request whose body exceeds the free memory.
func refuseBusy(w http.ResponseWriter) {
	admission.Retry(busyRetryAfter, admission.CodeNotReady, "too many requests are in progress; send the request again").Write(w)
}

// serve sends a request to the owner of a namespace's slot.
func (f *Front) serve(w http.ResponseWriter, r *http.Request, namespace string) {
	slot, ok := f.SlotOf(namespace)
	if !ok { // A new namespace.
		admission.NotReady().Write(w)
		return
	}
	f.Slot(slot).ServeHTTP(w, r)
}

// read reads the body of a request, which can be read again then; at most one byte more than the largest
// body.
func (f *Front) read(r *http.Request, memory *limits.Reservation) (body []byte, bad func(http.ResponseWriter)) {
	body, err := limits.ReadBody(r.Body, memory, r.ContentLength, event.MaxBodyBytes+1)
	switch {
	case errors.Is(err, limits.ErrNoMemory):
		return nil, refuseBusy
	case err != nil:
		return nil, func(w http.ResponseWriter) { f.Unreadable(w, err) }
	case !memory.Grow(int64(len(body))): // The parsed body is about as large.
		return nil, refuseBusy
	}
	replay(r, body)
	return body, nil
}

// replay makes a request's body begin with the part that was read.
func replay(r *http.Request, read []byte) {
	rest := r.Body
	if again, ok := rest.(replayed); ok {
		rest = again.rest
	}
	r.Body = replayed{io.MultiReader(bytes.NewReader(read), rest), rest}
}

type replayed struct {
	io.Reader
	rest io.ReadCloser
}

func (r replayed) Close() error { return r.rest.Close() }

// ask sends a request whose key is in no live config to the owners of the doubtful slots, of which there
// is at least one, until one knows the key.
func (f *Front) ask(w http.ResponseWriter, r *http.Request, body []byte, doubtful []int) {
	for i, slot := range doubtful {
		var a answer.Writer
		asked := r.Clone(r.Context())
		asked.Body = io.NopCloser(bytes.NewReader(body))
		f.Slot(slot).ServeHTTP(&a, asked)
		if a.Status() != http.StatusUnauthorized || i == len(doubtful)-1 {
			maps.Copy(w.Header(), a.Header())
			w.WriteHeader(a.Status())
			_, _ = w.Write(a.Body())
			return
		}
	}
}
