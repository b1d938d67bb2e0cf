package jetstream

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// A log that does not fit creates nothing.
func TestSpaceIsCheckedFirst(t *testing.T) {
	const needed = 5*MinBytes + directoryBytes
	for name, c := range map[string]struct {
		account, disk int64
		want          []string
	}{
		"limit of the account": {needed - directoryBytes - 1, 2 * needed,
			[]string{"the log needs 1.2 GiB", "limit of the account", "replication.jetStream.maxBytes"}},
		"space of the server": {-1, needed - directoryBytes - 1,
			[]string{"the log needs 1.2 GiB in each of 1 NATS servers", "max_file_store 1.2 GiB, of which 0.0 GiB are reserved"}},
		"enough": {-1, needed, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, server.Options{Port: server.RANDOM_PORT, HTTPHost: "127.0.0.1", HTTPPort: server.RANDOM_PORT,
				JetStreamMaxStore: c.disk})
			limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: c.account, MaxStreams: -1, MaxConsumers: -1}
			if err := s.GlobalAccount().UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": limits}); err != nil {
				t.Fatal(err)
			}
			settings := config(s.ClientURL())
			settings.Monitoring = "http://" + s.MonitorAddr().String()
			_, err := connected(t, settings).OpenDirectory(t.Context(), 1)
			streams := 0
			for range administer(t, s.ClientURL()).StreamNames(t.Context()).Name() {
				streams++
			}
			if c.want == nil {
				if err != nil || streams != 4 {
					t.Errorf("got %d streams and error %v, want 4 and none", streams, err)
				}
				return
			}
			wantText(t, "a log that does not fit", err, c.want...)
			if streams != 0 {
				t.Errorf("streams: got %d, want 0", streams)
			}
		})
	}
}
