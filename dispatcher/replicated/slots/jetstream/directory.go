package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

var _ slots.Assignments = (*Assignments)(nil)

// DirectoryConfig describes the stream of the directory.
type DirectoryConfig struct {
	// Name is the name of the stream. Its records have the subject Subject.NAMESPACE.
	Name, Subject string
	// Replicas is the number of servers with a copy.
	Replicas int
	// MaxBytes is the size at which the stream accepts no more records, of about 200 bytes each.
	MaxBytes int64
	// Installation is Config.Installation.
	Installation string
}

// Assignments is the stream of the directory in JetStream.
type Assignments struct {
	js      jetstream.JetStream
	stream  jetstream.Stream
	name    string
	subject string
}

// OpenAssignments returns the stream of the directory, and creates it when it is missing. It fails
// when the stream has settings with which it cannot keep the records.
func OpenAssignments(ctx context.Context, nc *nats.Conn, c DirectoryConfig) (*Assignments, error) {
	s, err := openAssignments(ctx, nc, c)
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", c.Name, err)
	}
	return s, nil
}

func openAssignments(ctx context.Context, nc *nats.Conn, c DirectoryConfig) (*Assignments, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	stream, err := openStream(ctx, js, jetstream.StreamConfig{
		Metadata: metadata(c.Installation),
		Name:     c.Name, Subjects: []string{c.Subject + ".*"}, Replicas: c.Replicas, MaxBytes: c.MaxBytes,
		Storage: jetstream.FileStorage, Retention: jetstream.LimitsPolicy, Discard: jetstream.DiscardNew,
		DenyDelete: true, DenyPurge: true,
	}, func() error { return nil })
	if err != nil {
		return nil, err
	}
	return &Assignments{js, stream, c.Name, c.Subject}, nil
}

// subjectOf returns the subject of a namespace. A DNS name has no underscore.
func (s *Assignments) subjectOf(namespace string) string {
	return s.subject + "." + strings.ReplaceAll(namespace, ".", "_")
}

// Create implements slots.Assignments.
func (s *Assignments) Create(ctx context.Context, a slots.Assignment) (uint64, error) {
	if err := a.Validate(); err != nil {
		return 0, err
	}
	data, _ := json.Marshal(a) // No field can fail to marshal.
	ack, err := s.js.Publish(ctx, s.subjectOf(a.Namespace), data,
		jetstream.WithExpectStream(s.name), jetstream.WithExpectLastSequencePerSubject(0), jetstream.WithRetryAttempts(0))
	if err != nil {
		return 0, publishError(err)
	}
	return ack.Sequence, nil
}

// Get implements slots.Assignments. The stream's leader answers.
func (s *Assignments) Get(ctx context.Context, namespace string) (slots.Assignment, uint64, error) {
	m, err := s.stream.GetLastMsgForSubject(ctx, s.subjectOf(namespace))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return slots.Assignment{}, 0, slots.ErrNoRecord
	}
	if err != nil {
		return slots.Assignment{}, 0, err
	}
	a, err := s.decode(m.Subject, m.Data)
	return a, m.Sequence, err
}

// decode decodes a record.
func (s *Assignments) decode(subject string, data []byte) (a slots.Assignment, err error) {
	err = json.Unmarshal(data, &a)
	if err == nil && subject != s.subjectOf(a.Namespace) {
		err = fmt.Errorf("the record is of namespace %s", a.Namespace)
	}
	if err != nil {
		err = fmt.Errorf("stream %s has a damaged record of the subject %s: %w", s.name, subject, err)
	}
	return a, err
}

// directoryFix is what to do about a missing directory.
const directoryFix = "restore it from a backup, or create it with posthorn replication adopt and the same --replication-url, --replication-name and --replication-installation; the owners of the slots then assign the namespaces whose messages they have"

// State implements slots.Assignments.
func (s *Assignments) State(ctx context.Context) (slots.State, error) {
	info, err := s.stream.Info(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return slots.State{}, fmt.Errorf("%w: %s, the directory of the slots, was deleted; "+directoryFix, slots.ErrNoStream, s.name)
	}
	if err != nil {
		return slots.State{}, err
	}
	return slots.State{Last: info.State.LastSeq, ID: idOf(info)}, nil
}

// Tail implements slots.Assignments.
func (s *Assignments) Tail(ctx context.Context, from uint64, fn func(uint64, slots.Assignment) error) error {
	return tail(ctx, s.js, s.name, from, func(sequence uint64, m jetstream.Msg) error {
		a, err := s.decode(m.Subject(), m.Data())
		if err != nil {
			return err
		}
		return fn(sequence, a)
	})
}
