package jetstream

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Config describes the log of an installation.
type Config struct {
	// URL has the addresses of the servers: nats://HOST:PORT or tls://HOST:PORT, separated by commas.
	URL string
	// Name is the installation. It begins the names of streams, subjects and object stores, so several
	// installations can use the same servers.
	Name string
	// Installation identifies the processes that share the log: 1 to 200 letters, digits and ._:/-. It is
	// recorded in the stream of each slot and in the directory. Streams of another installation are refused,
	// because two installations can use the same Name by mistake.
	Installation string
	// Replicas is the number of servers with a copy.
	Replicas int
	// MaxBytes is the size at which a stream accepts no more records. The object store of the snapshots
	// gets three times as much, the store of audiences' members the same.
	MaxBytes int64
	// Credentials is a file with the credentials of a NATS user, CA one with the certificates that sign
	// the servers' certificates, Cert and Key are the files of the client's certificate. All are read
	// again at each connection; each may be empty.
	Credentials, CA, Cert, Key string
	// Monitoring has the URLs of the monitoring ports of the servers, separated by commas, by which
	// sync_interval is checked; empty for no check.
	Monitoring string
	// AllowWeak accepts settings by which the loss of one server loses calls.
	AllowWeak bool
}

// Bounds of a Config, and requirements on the servers.
const (
	// MinReplicas survive the loss of one server.
	MinReplicas = 3
	// MinBytes is the smallest stream: less has no room for a snapshot behind 64 MB of changes.
	MinBytes = 256 << 20
	// maxPayload is the size of a record with its headers.
	maxPayload = 1 << 20
	// connectTimeout bounds a connection and a request to the monitoring port.
	connectTimeout = 5 * time.Second
)

var (
	minVersion = version.MustParseGeneric("2.15.0")
	name       = regexp.MustCompile(`^[A-Za-z0-9-]{1,40}$`)
)

// Validate returns an error that names the field and the rule.
func (c Config) Validate() error {
	switch {
	case !strings.HasPrefix(c.URL, "nats://") && !strings.HasPrefix(c.URL, "tls://"):
		return fmt.Errorf("%q is not nats://HOST:PORT or tls://HOST:PORT", redact(c.URL))
	case !name.MatchString(c.Name):
		return fmt.Errorf("the name %q is not 1 to 40 letters, digits and -", c.Name)
	case c.Replicas < 1 || c.Replicas > 5:
		return fmt.Errorf("%d replicas: use %d to 5", c.Replicas, MinReplicas)
	case c.Replicas < MinReplicas && !c.AllowWeak:
		return fmt.Errorf("%d replicas: the loss of one server would lose calls; use %d", c.Replicas, MinReplicas)
	case c.MaxBytes < MinBytes:
		return fmt.Errorf("%d bytes per stream: use %d or more", c.MaxBytes, MinBytes)
	case (c.Cert == "") != (c.Key == ""):
		return errors.New("a client certificate needs its key")
	}
	return slots.ValidateInstallation(c.Installation)
}

// userinfo is the part of an address before its host.
var userinfo = regexp.MustCompile(`[^/,]*@`)

// redact removes users, passwords and tokens from addresses.
func redact(addresses string) string { return userinfo.ReplaceAllString(addresses, "") }

// Client is a connection to the servers, which is opened again when it fails.
type Client struct {
	c  Config
	nc *nats.Conn
	// closed is closed when the connection is not opened again.
	closed chan struct{}
	// checked is true after a check that the log does not belong to another installation.
	checked atomic.Bool
}

// New starts to connect; it does not wait for the servers.
func New(c Config, logger *slog.Logger) (*Client, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	client := &Client{c: c, closed: make(chan struct{})}
	options := []nats.Option{
		nats.ClosedHandler(func(*nats.Conn) { close(client.closed) }),
		nats.RetryOnFailedConnect(true), nats.CustomInboxPrefix("_INBOX." + c.Name), nats.Timeout(connectTimeout),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				logger.Warn("connection to the log lost; connecting again", "error", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			logger.Info("connected to the log", "server", nc.ConnectedServerName())
			if err := checkServer(nc); err != nil {
				logger.Error("a server of the log has a setting that Posthorn cannot use", "problem", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			logger.Warn("error of the connection to the log", "error", err)
		}),
	}
	if c.Credentials != "" {
		options = append(options, nats.UserCredentials(c.Credentials))
	}
	if c.CA != "" {
		options = append(options, nats.RootCAs(c.CA))
	}
	if c.Cert != "" {
		options = append(options, nats.ClientCert(c.Cert, c.Key))
	}
	var err error
	if client.nc, err = Connect(c.URL, options...); err != nil {
		return nil, fmt.Errorf("connect to the log: %w; %s", err, connectFix(err))
	}
	return client, nil
}

// Close closes the connection.
func (c *Client) Close() { c.nc.Close() }

// Watch returns nil when ctx is done, and an error when the connection is closed and is not opened again:
// a server has answered that a request has no valid form. The streams of the Client then cannot be used
// any more.
func (c *Client) Watch(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-c.closed:
		return fmt.Errorf("the connection to the log at %s was closed: %w; restart the process, and check that nothing but NATS servers answers at this address", redact(c.c.URL), c.nc.LastError())
	}
}

// exists reports whether a stream exists. It asks for a consumer that no stream has: a user has the
// permission to do so for all streams, but not to read the settings of a slot that its process does not use.
func (c *Client) exists(ctx context.Context, name string) (bool, error) {
	js, err := jetstream.New(c.nc)
	if err != nil {
		return false, err
	}
	switch _, err := js.Consumer(ctx, name, "posthorn-none"); {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return false, nil
	case err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound):
		return false, explain(fmt.Errorf("look up stream %s: %w", name, err))
	}
	return true, nil
}

// checkInstallation returns slots.ErrOtherInstallation if the directory or slot 0 exists and belongs to another
// installation. It is the first check of a log: other errors advise settings that fit to the log, and a stream
// of another installation that has none recorded must not get the identity of this process.
func (c *Client) checkInstallation(ctx context.Context) error {
	if c.checked.Load() {
		return nil
	}
	js, err := jetstream.New(c.nc)
	if err != nil {
		return err
	}
	for _, name := range []string{c.slotStream(0), c.directory()} {
		stream, err := js.Stream(ctx, name)
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
			continue
		case err == nil:
			err = slots.CheckInstallation(stream.CachedInfo().Config.Metadata[metadataInstallation], c.c.Installation)
		}
		if err != nil {
			return explain(fmt.Errorf("open stream %s: %w", name, err))
		}
	}
	c.checked.Store(true)
	return nil
}

// directory and slotStream return the names of streams.
func (c *Client) directory() string          { return fmt.Sprintf("PH_%s_DIR", c.c.Name) }
func (c *Client) slotStream(slot int) string { return fmt.Sprintf("PH_%s_W%d", c.c.Name, slot) }

// members is the name of the object store of the audiences' members.
func (c *Client) members(slot int) string { return c.slotStream(slot) + "_members" }

// OpenSlot returns the stream and the object stores of a slot, and creates them when they are missing.
// It fails when the servers or the settings cannot keep what Posthorn promises.
func (c *Client) OpenSlot(ctx context.Context, slot int) (r slots.Remote, err error) {
	if err := c.check(ctx); err != nil {
		return r, err
	}
	return c.openSlot(ctx, slot, c.slotStream(slot))
}

// OpenAdopted is OpenSlot for Slot.Adopt: it creates the stream also when it was deleted.
func (c *Client) OpenAdopted(ctx context.Context, slot int) (r slots.Remote, err error) {
	if err := c.check(ctx); err != nil {
		return r, err
	}
	return c.openSlot(ctx, slot, "")
}

// openSlot opens a slot. bucket is as in StreamConfig.
func (c *Client) openSlot(ctx context.Context, slot int, bucket string) (r slots.Remote, err error) {
	base := c.slotStream(slot)
	log, err := Open(ctx, c.nc, StreamConfig{
		Name: base, Subject: fmt.Sprintf("ph.%s.w%d", c.c.Name, slot), Replicas: c.c.Replicas, MaxBytes: c.c.MaxBytes, Bucket: bucket,
		Installation: c.c.Installation,
	})
	if err != nil {
		return r, explain(err)
	}
	snapshots, err := OpenObjects(ctx, c.nc, ObjectsConfig{Bucket: base, Replicas: c.c.Replicas, MaxBytes: 3 * c.c.MaxBytes})
	if err != nil {
		return r, explain(err)
	}
	members, err := OpenObjects(ctx, c.nc, ObjectsConfig{Bucket: c.members(slot), Replicas: c.c.Replicas, MaxBytes: c.c.MaxBytes})
	if err != nil {
		return r, explain(err)
	}
	streams := []*kept{{stream: log.stream, want: log.want}, {stream: snapshots.stream, want: snapshots.want},
		{stream: members.stream, want: members.want}}
	return slots.Remote{
		Log: log, Snapshots: snapshots, Members: members, Rename: log.rename,
		Durability: func(ctx context.Context) (slots.Durability, error) {
			return c.durability(ctx, streams...)
		},
		Clocks: []slots.ServerTime{leaderTime(log.stream), leaderTime(snapshots.stream), leaderTime(members.stream)},
	}, nil
}

// leaderTime reads the clock of the server that leads a stream, which also gives the records their times.
func leaderTime(s jetstream.Stream) slots.ServerTime {
	return func(ctx context.Context) (time.Time, error) {
		ctx, cancel := context.WithTimeout(ctx, connectTimeout)
		defer cancel()
		info, err := s.Info(ctx)
		if err != nil {
			return time.Time{}, fmt.Errorf("read the state of stream %s: %w", s.CachedInfo().Config.Name, err)
		}
		return info.TimeStamp, nil
	}
}

// directoryBytes has room for 50,000 namespaces.
const directoryBytes = 16 << 20

// OpenDirectory returns the stream with the slot of each namespace. It creates the stream and the streams of a
// number of slots when they are missing, so that a process whose slots do not fit into the servers is
// not ready. The directory is opened before the slots. Its errors are OpenSlot's, and slots.ErrNoStream if slot
// 0 exists without the directory.
func (c *Client) OpenDirectory(ctx context.Context, number int) (slots.Assignments, error) {
	if err := c.check(ctx); err != nil {
		return nil, err
	}
	if err := c.checkDirectory(ctx); err != nil {
		return nil, err
	}
	if err := c.checkSpace(ctx, number); err != nil {
		return nil, err
	}
	a, err := c.openDirectory(ctx)
	if err != nil {
		return nil, err
	}
	for slot := range number {
		// This stream of a slot is created last.
		complete, err := c.exists(ctx, objectsPrefix+c.members(slot))
		if err == nil && !complete {
			_, err = c.openSlot(ctx, slot, c.slotStream(slot))
		}
		if err != nil {
			return nil, fmt.Errorf("slot %d of %d: %w", slot, number, err)
		}
	}
	return a, nil
}

// AdoptDirectory is OpenDirectory for Slot.Adopt: it creates the directory also for slots that exist, and no slots.
func (c *Client) AdoptDirectory(ctx context.Context) (slots.Assignments, error) {
	if err := c.check(ctx); err != nil {
		return nil, err
	}
	return c.openDirectory(ctx)
}

// checkDirectory returns ErrNoStream if the log has a slot and no directory. Earlier releases made such a log.
func (c *Client) checkDirectory(ctx context.Context) error {
	if exists, err := c.exists(ctx, c.directory()); exists || err != nil {
		return err
	}
	slot, err := c.exists(ctx, c.slotStream(0))
	if err == nil && slot {
		err = fmt.Errorf("%w: %s, the directory of the slots, but the stream %s exists: the directory was deleted, or an earlier release made this log with one slot; "+directoryFix, slots.ErrNoStream, c.directory(), c.slotStream(0))
	}
	return err
}

func (c *Client) openDirectory(ctx context.Context) (slots.Assignments, error) {
	a, err := OpenAssignments(ctx, c.nc, DirectoryConfig{
		Name: c.directory(), Subject: fmt.Sprintf("ph.%s.dir", c.c.Name), Replicas: c.c.Replicas, MaxBytes: directoryBytes,
		Installation: c.c.Installation,
	})
	if err != nil {
		return nil, explain(err)
	}
	return a, nil
}

var _ slots.Bus = (*Client)(nil)

// heartbeats is the subject of heartbeats.
func (c *Client) heartbeats() string { return fmt.Sprintf("ph.%s.members", c.c.Name) }

// Publish implements slots.Bus. No stream has the heartbeats.
func (c *Client) Publish(heartbeat []byte) error { return c.nc.Publish(c.heartbeats(), heartbeat) }

// Subscribe implements slots.Bus.
func (c *Client) Subscribe(fn func([]byte)) (stop func(), err error) {
	s, err := c.nc.Subscribe(c.heartbeats(), func(m *nats.Msg) { fn(m.Data) })
	if err != nil {
		return nil, fmt.Errorf("subscribe to the heartbeats of the other processes: %w", err)
	}
	return func() { _ = s.Unsubscribe() }, nil
}

// ErrNotConnected reports that no server has accepted a connection.
var ErrNotConnected = errors.New("cannot be reached")

// check checks the servers and the installation of the log.
func (c *Client) check(ctx context.Context) error {
	if err := c.checkServers(ctx); err != nil {
		return err
	}
	return c.checkInstallation(ctx)
}

// checkServers checks the servers.
func (c *Client) checkServers(ctx context.Context) error {
	if !c.nc.IsConnected() {
		cause := c.nc.LastError()
		if cause == nil {
			cause = errors.New("no answer yet")
		}
		return fmt.Errorf("the log at %s %w: %w; %s", redact(c.c.URL), ErrNotConnected, cause, connectFix(cause))
	}
	if err := checkServer(c.nc); err != nil {
		return err
	}
	if c.c.Monitoring == "" || c.c.AllowWeak {
		return nil
	}
	servers, err := c.readServers(ctx)
	switch {
	case err != nil:
		return err
	case syncOf(servers) == slots.SyncPeriodic:
		return errors.New(weakSync)
	case syncOf(servers) == slots.SyncUnknown:
		return errors.New(strings.Join(disabledIn(ctx, servers), "; "))
	}
	return nil
}

// checkServer checks the server of a connection. The settings of the others are not known before the
// client connects to them.
func checkServer(nc *nats.Conn) error {
	found, err := version.ParseGeneric(nc.ConnectedServerVersion())
	if err != nil || found.LessThan(minVersion) {
		return fmt.Errorf("the NATS server %s has version %q; use %s or later", nc.ConnectedAddr(), nc.ConnectedServerVersion(), minVersion)
	}
	if most := nc.MaxPayload(); most < maxPayload {
		return fmt.Errorf("the NATS server %s accepts messages of %d bytes; set max_payload to %d or more", nc.ConnectedAddr(), most, maxPayload)
	}
	return nil
}

// connectFix returns the fix for an error of a connection.
func connectFix(err error) string {
	_, isUnknown := errors.AsType[x509.UnknownAuthorityError](err)
	_, isOtherHost := errors.AsType[x509.HostnameError](err)
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAuthRevoked),
		errors.Is(err, nats.ErrAccountAuthExpired):
		return "the servers refuse the user; correct --replication-credentials, or the user in --replication-url"
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return "correct --replication-credentials, --replication-ca, --replication-cert and --replication-key"
	case isUnknown:
		return "set --replication-ca to the certificates that sign those of the servers"
	case isOtherHost:
		return "use in --replication-url the names of the servers in their certificates"
	case errors.Is(err, nats.ErrSecureConnRequired), errors.Is(err, nats.ErrSecureConnWanted):
		return "use tls:// in --replication-url exactly when the servers have TLS"
	}
	return "start the NATS servers, or correct the address in --replication-url, and the credentials"
}

// kept is a stream, and the settings with which it keeps its messages.
type kept struct {
	stream jetstream.Stream
	want   jetstream.StreamConfig
	// before is the last reading of its servers.
	before extents
}

// durability reads the present settings and copies of a slot's streams, of which the first one has the records. A
// change of a stream while it is in use loses no calls by itself, so it is not an error.
func (c *Client) durability(ctx context.Context, streams ...*kept) (slots.Durability, error) {
	d := slots.Durability{Sync: slots.SyncUnknown, Replicas: math.MaxInt, Current: math.MaxInt}
	infos := make([]*jetstream.StreamInfo, len(streams))
	for i, s := range streams {
		info, err := s.stream.Info(ctx)
		if i > 0 && errors.Is(err, jetstream.ErrStreamNotFound) {
			d.Gaps = append(d.Gaps, fmt.Sprintf("the object store %s was deleted; its owner creates it again and stores its objects", strings.TrimPrefix(s.want.Name, objectsPrefix)))
			continue
		}
		if err != nil {
			return slots.Durability{}, fmt.Errorf("read the settings of stream %s: %w", s.want.Name, err)
		}
		infos[i] = info
		if info.Config.Replicas < MinReplicas {
			d.Weak = append(d.Weak, fmt.Sprintf("stream %s has num_replicas %d, so the loss of one server can lose calls; set it to %d", info.Config.Name, info.Config.Replicas, MinReplicas))
		} else if err := checkSettings(info.Config, s.want); err != nil {
			d.Weak = append(d.Weak, fmt.Sprintf("stream %s: %v", info.Config.Name, err))
		}
	}
	// The client may have connected to another server. While it connects, the server is not known.
	if err := checkServer(c.nc); err != nil && c.nc.IsConnected() {
		d.Weak = append(d.Weak, err.Error())
	}
	var servers []serverState
	if c.c.Monitoring != "" {
		servers, _ = c.readServers(ctx) // Without an answer of the monitoring ports, the values are not known.
	}
	d.Sync, d.Disabled = syncOf(servers), disabledIn(ctx, servers)
	if d.Sync == slots.SyncPeriodic {
		d.Weak = append(d.Weak, weakSync)
	}
	for i, s := range streams {
		if infos[i] == nil {
			continue
		}
		found := s.compare(infos[i], servers, i == 0)
		for _, name := range slices.Sorted(maps.Keys(found)) {
			what := fmt.Sprintf("%d records", found[name])
			if i > 0 {
				what = fmt.Sprintf("%d messages of stream %s", found[name], s.want.Name)
			}
			d.Gaps = append(d.Gaps, fmt.Sprintf("server %s lacks %s: stop it, empty its store_dir, start it, before any other disk is replaced", name, what))
		}
		d.LacksRecords = d.LacksRecords || i == 0 && len(found) > 0
		d.Replicas, d.Current = min(d.Replicas, infos[i].Config.Replicas), min(d.Current, currentCopies(infos[i], found))
	}
	return d, nil
}

// compare returns the servers that lack messages of a stream, by this reading and the one before.
func (k *kept) compare(info *jetstream.StreamInfo, servers []serverState, isLog bool) map[string]uint64 {
	before, now := k.before, readExtents(info, servers)
	k.before = now
	if isLog {
		return lacking(before, now, func(name string) bool {
			return slices.ContainsFunc(info.Cluster.Replicas, func(r *jetstream.PeerInfo) bool { return r.Name == name && keepsUp(r) })
		})
	}
	return differing(before, now)
}

const (
	// inProgress is the number of records that a server may lack because they are being stored: under
	// load the slowest of three servers rarely has all of them.
	inProgress = 100
	// silentAfter is the time without an answer after which the lag of a server is not known.
	silentAfter = 10 * time.Second
)

// currentCopies returns the number of servers that have all records of a stream, except for those in
// progress, without the servers that are known to lack some.
func currentCopies(info *jetstream.StreamInfo, lacking map[string]uint64) int {
	if info.Cluster == nil {
		return 1 // A single server.
	}
	n := 0
	if leader := info.Cluster.Leader; leader != "" && lacking[leader] == 0 {
		n++
	}
	for _, r := range info.Cluster.Replicas {
		if keepsUp(r) && lacking[r.Name] == 0 {
			n++
		}
	}
	return n
}

// keepsUp reports whether a server has all records of a stream but those in progress, as the leader knows.
func keepsUp(r *jetstream.PeerInfo) bool {
	// Active is 0 for a server that never answered.
	return !r.Offline && (r.Current || r.Active > 0 && r.Active < silentAfter && r.Lag <= inProgress)
}

const weakSync = "a NATS server does not sync each record: a power loss of all servers would lose calls; set jetstream { sync_interval: always }"

// ErrOffline reports that too few servers of the log run to create a stream, or that they have not found each
// other yet.
var ErrOffline = errors.New("start all servers, and wait until they have found each other")

// explain adds the fix to errors of the servers.
func explain(err error) error {
	var refused *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount),
		errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w; enable JetStream in the servers and for the account", err)
	case errors.Is(err, nats.ErrPermissionViolation):
		return fmt.Errorf("%w; the user needs the permissions of docs/replication.md", err)
	case errors.As(err, &refused) && strings.Contains(refused.Description, "peer offline"):
		return fmt.Errorf("%w: %w", err, ErrOffline)
	case errors.As(err, &refused) && (strings.Contains(refused.Description, "insufficient") ||
		strings.Contains(refused.Description, "no suitable peers")):
		return fmt.Errorf("%w; add servers or storage (max_file_store), or use fewer replicas or smaller streams", err)
	}
	return err
}
