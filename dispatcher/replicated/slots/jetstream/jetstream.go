// Package jetstream keeps the streams of slots in NATS JetStream. It is the only package that uses
// NATS.
package jetstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

var _ slots.Log = (*Log)(nil)

// duplicateWindow is the time for which the server finds a repeated record by its id. Later it is
// found by its expected sequence.
const duplicateWindow = 2 * time.Minute

// Error codes of the server that package jetstream of nats.go does not name.
const (
	codeStoreFailed       jetstream.ErrorCode = 10077
	codeDuplicateConflict jetstream.ErrorCode = 10158
)

// StreamConfig describes the stream of a slot.
type StreamConfig struct {
	// Name is the name of the stream. Its records have the subject Subject.
	Name, Subject string
	// Replicas is the number of servers with a copy.
	Replicas int
	// MaxBytes is the size at which the stream accepts no more records.
	MaxBytes int64
	// Bucket is the object store of the slot; empty for none. If it exists without the stream, the stream
	// was deleted, and is not created again.
	Bucket string
	// Installation is Config.Installation.
	Installation string
}

// Log is the stream of one slot in JetStream.
type Log struct {
	js      jetstream.JetStream
	stream  jetstream.Stream
	want    jetstream.StreamConfig
	name    string
	subject string
}

// Connect connects to servers with settings that find a lost server within seconds. The client
// buffers nothing while it is not connected: a record must not be sent later than its caller knows. It
// also connects again to a server that has refused the user twice: credentials are renewed meanwhile.
func Connect(url string, options ...nats.Option) (*nats.Conn, error) {
	return nats.Connect(url, append([]nats.Option{
		nats.Name("posthorn"), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(time.Second), nats.MaxPingsOutstanding(2),
	}, options...)...)
}

// metadataID is the key, in the metadata of a stream, of a random value that is made with the stream, and
// metadataReplaced the values before its adoptions.
const (
	metadataID       = "posthorn-id"
	metadataReplaced = "posthorn-replaced"
	// maxReplaced bounds the former ids.
	maxReplaced = 32
	// metadataInstallation is the key, in the metadata of a stream, of Config.Installation.
	metadataInstallation = "posthorn-installation"
)

// metadata returns the metadata of a new stream of an installation.
func metadata(installation string) map[string]string {
	return map[string]string{metadataID: rand.Text(), metadataInstallation: installation}
}

// Open returns the stream of a slot, and creates it when it is missing. It fails when the stream
// has settings with which it cannot keep the records.
func Open(ctx context.Context, nc *nats.Conn, c StreamConfig) (*Log, error) {
	l, err := open(ctx, nc, c)
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", c.Name, err)
	}
	return l, nil
}

func open(ctx context.Context, nc *nats.Conn, c StreamConfig) (*Log, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	want := jetstream.StreamConfig{
		Name: c.Name, Subjects: []string{c.Subject}, Replicas: c.Replicas, MaxBytes: c.MaxBytes,
		Storage: jetstream.FileStorage, Retention: jetstream.LimitsPolicy, Discard: jetstream.DiscardNew,
		Duplicates: duplicateWindow, DenyDelete: true,
		Metadata: metadata(c.Installation),
	}
	stream, err := openStream(ctx, js, want, func() error { return c.checkUnused(ctx, js) })
	if err != nil {
		return nil, err
	}
	return &Log{js, stream, want, c.Name, c.Subject}, nil
}

// openStream returns a stream. One that is missing is created if mayCreate returns nil. The installation of
// want is recorded in a stream that has none; a stream of another installation is slots.ErrOtherInstallation. A
// smaller max_bytes, of an earlier configuration, is raised. Other settings with which the stream cannot keep
// its messages are an error.
func openStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig,
	mayCreate func() error) (jetstream.Stream, error) {
	stream, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if err := mayCreate(); err != nil {
			return nil, err
		}
		if stream, err = js.CreateStream(ctx, want); errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			stream, err = js.Stream(ctx, want.Name) // Another process has created it meanwhile.
		}
	}
	if err != nil {
		return nil, err
	}
	found := stream.CachedInfo().Config
	installation := want.Metadata[metadataInstallation]
	if err := slots.CheckInstallation(found.Metadata[metadataInstallation], installation); err != nil {
		return nil, err
	}
	before := found.MaxBytes
	if before > 0 {
		found.MaxBytes = max(before, want.MaxBytes)
	}
	if err := checkSettings(found, want); err != nil {
		return nil, err
	}
	var changes []string
	if found.MaxBytes > before {
		changes = append(changes, fmt.Sprintf("raise max_bytes from %d to %d", before, found.MaxBytes))
	}
	if found.Metadata[metadataInstallation] != installation {
		found.Metadata = withMetadata(found.Metadata, metadataInstallation, installation)
		changes = append(changes, fmt.Sprintf("record the installation %q", installation))
	}
	if len(changes) > 0 {
		if stream, err = js.UpdateStream(ctx, found); err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(changes, " and "), err)
		}
	}
	return stream, nil
}

// withMetadata returns a copy of the metadata of a stream with another value.
func withMetadata(m map[string]string, key, value string) map[string]string {
	m = maps.Clone(m)
	if m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}

// deletedFix is what to do about a deleted stream.
const deletedFix = "restore it with its object stores from a backup, or run posthorn replication adopt to continue with the newest snapshot, or with --data with the files of a process"

// checkUnused returns ErrNoStream if the object store of a missing stream exists.
func (c StreamConfig) checkUnused(ctx context.Context, js jetstream.JetStream) error {
	if c.Bucket == "" {
		return nil
	}
	switch _, err := js.Stream(ctx, objectsPrefix+c.Bucket); {
	case err == nil:
		return fmt.Errorf("%w, but its object store %s does, so it was deleted; "+deletedFix, slots.ErrNoStream, c.Bucket)
	case !errors.Is(err, jetstream.ErrStreamNotFound):
		return err
	}
	return nil
}

// checkSettings returns an error that names the setting by which a stream cannot keep the records.
// More replicas, more bytes, and a longer window are permitted.
func checkSettings(found, want jetstream.StreamConfig) error {
	for _, s := range []struct {
		ok          bool
		name        string
		found, want any
	}{
		{slices.Equal(found.Subjects, want.Subjects), "subjects", found.Subjects, want.Subjects},
		{found.Storage == want.Storage, "storage", found.Storage, want.Storage},
		{found.Retention == want.Retention, "retention", found.Retention, want.Retention},
		{found.Discard == want.Discard, "discard", found.Discard, want.Discard},
		{found.Replicas >= want.Replicas, "num_replicas", found.Replicas, want.Replicas},
		{found.MaxBytes <= 0 || found.MaxBytes >= want.MaxBytes, "max_bytes", found.MaxBytes, want.MaxBytes},
		{found.MaxAge == 0, "max_age", found.MaxAge, 0},
		{found.MaxMsgs <= 0, "max_msgs", found.MaxMsgs, -1},
		{found.MaxMsgsPerSubject <= 0, "max_msgs_per_subject", found.MaxMsgsPerSubject, -1},
		{found.MaxMsgSize <= 0 || found.MaxMsgSize >= maxPayload, "max_msg_size", found.MaxMsgSize, -1},
		{found.Duplicates >= want.Duplicates, "duplicate_window", found.Duplicates, want.Duplicates},
		{found.Mirror == nil && len(found.Sources) == 0, "mirror or sources", "another stream", "none"},
		{found.AllowRollup || !want.AllowRollup, "allow_rollup_hdrs", found.AllowRollup, true},
		{!found.DenyPurge || want.DenyPurge, "deny_purge", found.DenyPurge, false},
		{!found.Sealed && !found.NoAck && found.SubjectTransform == nil, "sealed, no_ack or subject_transform", "set", "not set"},
	} {
		if !s.ok {
			return fmt.Errorf("the stream has %s %v; set it to %v", s.name, s.found, s.want)
		}
	}
	return nil
}

// Publish implements slots.Log.
func (l *Log) Publish(ctx context.Context, expected uint64, id string, record []byte) (uint64, error) {
	ack, err := l.js.Publish(ctx, l.subject, record,
		jetstream.WithExpectStream(l.name), jetstream.WithExpectLastSequence(expected), jetstream.WithMsgID(id),
		jetstream.WithRetryAttempts(0)) // The caller repeats.
	if err != nil {
		return 0, publishError(err)
	}
	return ack.Sequence, nil
}

// publishError translates the answers by which the record was not appended.
func publishError(err error) error {
	var refusal *jetstream.APIError
	if !errors.As(err, &refusal) {
		return err
	}
	switch refusal.ErrorCode {
	case jetstream.JSErrCodeStreamWrongLastSequence, jetstream.JSErrCodeStreamWrongLastSequenceConstant:
		return fmt.Errorf("%w: %w", slots.ErrWrongSequence, err)
	case codeDuplicateConflict:
		return fmt.Errorf("%w: %w", slots.ErrInProcess, err)
	case codeStoreFailed:
		if strings.Contains(refusal.Description, "maximum bytes exceeded") {
			return fmt.Errorf("%w: %w", slots.ErrNoSpace, err)
		}
	}
	return err
}

// Get implements slots.Log. The stream's leader answers.
func (l *Log) Get(ctx context.Context, from uint64) (slots.Entry, error) {
	m, err := l.stream.GetMsg(ctx, max(from, 1), jetstream.WithGetMsgSubject(l.subject))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return slots.Entry{}, slots.ErrNoRecord
	}
	if err != nil {
		return slots.Entry{}, err
	}
	return slots.Entry{Sequence: m.Sequence, Record: m.Data}, nil
}

// Tail implements slots.Log.
func (l *Log) Tail(ctx context.Context, from uint64, fn func(slots.Entry) error) error {
	return tail(ctx, l.js, l.name, from, func(sequence uint64, m jetstream.Msg) error {
		return fn(slots.Entry{Sequence: sequence, Record: m.Data()})
	})
}

// tail calls fn for the messages of a stream from a sequence on.
func tail(ctx context.Context, js jetstream.JetStream, stream string, from uint64, fn func(sequence uint64, m jetstream.Msg) error) error {
	consumer, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1),
		// Without a bound, Next ignores ctx until the stream can be read again, and never returns when it
		// was deleted.
		MaxResetAttempts: 1,
	})
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	messages, err := consumer.Messages()
	if err != nil {
		return fmt.Errorf("read stream %s: %w", stream, err)
	}
	defer messages.Stop()
	for {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("read stream %s: %w", stream, err)
		}
		if err := fn(meta.Sequence.Stream, m); err != nil {
			return err
		}
	}
}

// State implements slots.Log.
func (l *Log) State(ctx context.Context) (slots.State, error) {
	info, err := l.stream.Info(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return slots.State{}, fmt.Errorf("%w: %s was deleted; "+deletedFix, slots.ErrNoStream, l.name)
	}
	if err != nil {
		return slots.State{}, err
	}
	s := slots.State{First: info.State.FirstSeq, Last: info.State.LastSeq, Missing: uint64(info.State.NumDeleted),
		Bytes: int64(info.State.Bytes), MaxBytes: max(info.Config.MaxBytes, 0)}
	if info.State.Msgs == 0 {
		s.First = s.Last + 1
	}
	s.ID, s.Replaced = idOf(info), strings.Fields(info.Config.Metadata[metadataReplaced])
	return s, nil
}

// idOf returns the id of a stream. One that was created by hand has none; its time of creation is as
// good.
func idOf(info *jetstream.StreamInfo) string {
	if id := info.Config.Metadata[metadataID]; id != "" {
		return id
	}
	return info.Created.UTC().Format(time.RFC3339Nano)
}

// rename gives the stream a new id, which replaces the present one and others.
func (l *Log) rename(ctx context.Context, replaced ...string) error {
	info, err := l.stream.Info(ctx)
	if err != nil {
		return err
	}
	c := info.Config
	ids := strings.Fields(c.Metadata[metadataReplaced])
	for _, id := range append(replaced, idOf(info)) {
		if id != "" && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	c.Metadata = withMetadata(c.Metadata, metadataReplaced, strings.Join(ids[max(0, len(ids)-maxReplaced):], " "))
	c.Metadata[metadataID] = rand.Text()
	_, err = l.js.UpdateStream(ctx, c)
	return err
}

// Trim implements slots.Log.
func (l *Log) Trim(ctx context.Context, before uint64) error {
	return l.stream.Purge(ctx, jetstream.WithPurgeSequence(before))
}
