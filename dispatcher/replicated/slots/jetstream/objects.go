package jetstream

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

var _ slots.Objects = (*Objects)(nil)

// ObjectsConfig describes the object store of a slot.
type ObjectsConfig struct {
	Bucket   string
	Replicas int
	// MaxBytes is the size at which the store accepts no more objects.
	MaxBytes int64
}

// Objects is the object store of one slot in JetStream.
type Objects struct {
	store  jetstream.ObjectStore
	stream jetstream.Stream
	want   jetstream.StreamConfig
	bucket string
	js     jetstream.JetStream

	mu sync.Mutex
	// known are the objects whose chunks are known, by name.
	known map[string]*jetstream.ObjectInfo
}

// OpenObjects returns an object store, and creates it when it is missing. It fails when its stream has
// settings with which it cannot keep the objects.
func OpenObjects(ctx context.Context, nc *nats.Conn, c ObjectsConfig) (*Objects, error) {
	o, err := openObjects(ctx, nc, c)
	if err != nil {
		return nil, fmt.Errorf("open object store %s, stream %s: %w", c.Bucket, objectsPrefix+c.Bucket, err)
	}
	return o, nil
}

func openObjects(ctx context.Context, nc *nats.Conn, c ObjectsConfig) (*Objects, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	// These are the settings of an object store that nats.go creates.
	want := jetstream.StreamConfig{
		Name: objectsPrefix + c.Bucket, Subjects: []string{fmt.Sprintf("$O.%s.C.>", c.Bucket), fmt.Sprintf("$O.%s.M.>", c.Bucket)},
		Replicas: c.Replicas, MaxBytes: c.MaxBytes, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew,
		AllowRollup: true, AllowDirect: true,
	}
	stream, err := openStream(ctx, js, want, func() error { return nil })
	if err != nil {
		return nil, err
	}
	store, err := js.ObjectStore(ctx, c.Bucket)
	if err != nil {
		return nil, err
	}
	return &Objects{store: store, stream: stream, want: want, bucket: c.Bucket, js: js, known: map[string]*jetstream.ObjectInfo{}}, nil
}

// objectsPrefix begins the name of the stream of an object store.
const objectsPrefix = "OBJ_"

// restPrefix begins the names that List returns for chunks without an object.
const restPrefix = "rest/"

func (o *Objects) chunks(id string) string { return fmt.Sprintf("$O.%s.C.%s", o.bucket, id) }

func (o *Objects) meta(name string) string {
	return fmt.Sprintf("$O.%s.M.%s", o.bucket, base64.URLEncoding.EncodeToString([]byte(name)))
}

// Put implements slots.Objects.
func (o *Objects) Put(ctx context.Context, name string, data io.Reader) error {
	stored, err := o.store.Put(ctx, jetstream.ObjectMeta{Name: name}, data)
	if err != nil {
		// The client may have stored the name although the server refused some of the chunks.
		return errors.Join(publishError(err), o.Delete(ctx, name))
	}
	o.remember(name, stored)
	return nil
}

// remember keeps the description of an object; nil for one that was deleted.
func (o *Objects) remember(name string, info *jetstream.ObjectInfo) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if info == nil {
		delete(o.known, name)
		return
	}
	o.known[name] = info
}

// describe returns the description of an object; jetstream.ErrObjectNotFound if it is not complete.
func (o *Objects) describe(ctx context.Context, name string) (*jetstream.ObjectInfo, error) {
	o.mu.Lock()
	info := o.known[name]
	o.mu.Unlock()
	if info != nil {
		return info, nil
	}
	info, err := o.store.GetInfo(ctx, name)
	if err == nil {
		o.remember(name, info)
	}
	return info, err
}

// Missing implements slots.Objects.
func (o *Objects) Missing(ctx context.Context, names []string) (missing []string, err error) {
	chunks, err := o.subjects(ctx, o.chunks("*"))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		_, err = openStream(ctx, o.js, o.want, func() error { return nil })
		return names, err
	}
	if err != nil {
		return nil, err
	}
	metas, err := o.subjects(ctx, fmt.Sprintf("$O.%s.M.*", o.bucket))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		described, err := o.describe(ctx, name)
		switch {
		case errors.Is(err, jetstream.ErrObjectNotFound):
			missing = append(missing, name)
		case err != nil:
			return nil, err
		case metas[o.meta(name)] == 0 || chunks[o.chunks(described.NUID)] < uint64(described.Chunks):
			missing = append(missing, name)
			o.remember(name, nil) // It may be stored again by another process.
		}
	}
	return missing, nil
}

// Get implements slots.Objects.
func (o *Objects) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	object, err := o.store.Get(ctx, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, slots.ErrNoObject
	}
	if err != nil {
		return nil, err
	}
	described, err := object.Info()
	if err == nil {
		err = o.checkChunks(ctx, described)
	}
	if err != nil {
		return nil, errors.Join(err, object.Close())
	}
	return &objectReader{object}, nil
}

// checkChunks returns ErrNoObject when chunks of an object are missing: a reader would wait for them.
func (o *Objects) checkChunks(ctx context.Context, described *jetstream.ObjectInfo) error {
	subject := o.chunks(described.NUID)
	info, err := o.stream.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return err
	}
	if n := info.State.Subjects[subject]; n < uint64(described.Chunks) {
		return fmt.Errorf("%w: %d of its %d chunks exist", slots.ErrNoObject, n, described.Chunks)
	}
	return nil
}

// objectReader ends a read that gets no data.
type objectReader struct{ jetstream.ObjectResult }

// emptyReads is the number of reads without data, of 5 s each, after which an object cannot be read.
const emptyReads = 6

func (r *objectReader) Read(p []byte) (int, error) {
	for range emptyReads {
		if n, err := r.ObjectResult.Read(p); n > 0 || err != nil {
			return n, err
		}
	}
	return 0, errors.New("the object store sends no data")
}

// List implements slots.Objects. It reads the subjects of the bucket's stream: ObjectStore.List waits
// without end when the stream has no leader at its start, or when the last object is deleted
// meanwhile.
func (o *Objects) List(ctx context.Context) (names []string, err error) {
	// The chunks first: an object that is stored meanwhile would look like a rest.
	chunks, err := o.subjects(ctx, o.chunks("*"))
	if err != nil {
		return nil, err
	}
	metas, err := o.subjects(ctx, fmt.Sprintf("$O.%s.M.*", o.bucket))
	if err != nil {
		return nil, err
	}
	for subject := range metas {
		name, err := base64.URLEncoding.DecodeString(subject[strings.LastIndexByte(subject, '.')+1:])
		if err != nil {
			return nil, fmt.Errorf("the bucket has the unknown subject %s: %w", subject, err)
		}
		names = append(names, string(name))
	}
	if len(chunks) <= len(metas) {
		return names, nil // Each object has chunks, so there are no others.
	}
	for _, name := range names {
		described, err := o.store.GetInfo(ctx, name, jetstream.GetObjectInfoShowDeleted())
		if errors.Is(err, jetstream.ErrObjectNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		delete(chunks, o.chunks(described.NUID))
	}
	for subject := range chunks {
		names = append(names, restPrefix+strings.TrimPrefix(subject, o.chunks("")))
	}
	return names, nil
}

// subjects returns the subjects of the bucket's stream that match a filter.
func (o *Objects) subjects(ctx context.Context, filter string) (map[string]uint64, error) {
	info, err := o.stream.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, err
	}
	return info.State.Subjects, nil
}

// Delete implements slots.Objects. It leaves no mark of the deletion: names are not used again.
func (o *Objects) Delete(ctx context.Context, name string) error {
	if id, ok := strings.CutPrefix(name, restPrefix); ok {
		return o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.chunks(id)))
	}
	info, err := o.store.GetInfo(ctx, name, jetstream.GetObjectInfoShowDeleted())
	o.remember(name, nil)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.meta(name))); err != nil {
		return err
	}
	return o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.chunks(info.NUID)))
}
