package jetstream

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// serverState is what the monitoring port of a server shows.
type serverState struct {
	Disabled bool `json:"disabled"`
	Config   struct {
		SyncAlways bool  `json:"sync_always"`
		MaxStore   int64 `json:"max_storage"`
	} `json:"config"`
	// Stored are the bytes on the disk, Reserved the sizes of all streams.
	Stored   int64 `json:"storage"`
	Reserved int64 `json:"reserved_storage"`
	Meta     struct {
		Size int `json:"cluster_size"`
	} `json:"meta_cluster"`
	Accounts []struct {
		Streams []jetstream.StreamInfo `json:"stream_detail"`
	} `json:"account_details"`

	url string
}

// maxMonitoring bounds the answer of a monitoring port: some 10,000 streams.
const maxMonitoring = 32 << 20

// readServers asks the monitoring ports. A server that does not answer is left out, unless none does: it may be
// stopped.
func (c *Client) readServers(ctx context.Context) (found []serverState, err error) {
	var failed []error
	for url := range strings.SplitSeq(c.c.Monitoring, ",") {
		s := serverState{url: strings.TrimSuffix(url, "/")}
		if err := getMonitoring(ctx, s.url+"/jsz?config=true&accounts=true&streams=true", &s); err != nil {
			failed = append(failed, fmt.Errorf("check sync_interval: %w", err))
			continue
		}
		found = append(found, s)
	}
	if len(found) == 0 {
		return nil, errors.Join(failed...)
	}
	return found, nil
}

// getMonitoring decodes the answer of a monitoring port.
func getMonitoring(ctx context.Context, url string, to any) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered with status %d; set --replication-monitoring to the URL of a NATS server's monitoring port", url, answer.StatusCode)
	}
	if err := json.NewDecoder(http.MaxBytesReader(nil, answer.Body, maxMonitoring)).Decode(to); err != nil {
		return fmt.Errorf("%s did not answer with the state of JetStream: %w", url, err)
	}
	return nil
}

// syncOf returns whether all servers with JetStream sync each record to their disks.
func syncOf(servers []serverState) slots.Sync {
	sync := slots.SyncUnknown
	for _, s := range servers {
		switch {
		case s.Disabled:
		case !s.Config.SyncAlways:
			return slots.SyncPeriodic
		default:
			sync = slots.SyncAlways
		}
	}
	return sync
}

// disabledIn returns a problem for each server without JetStream: a server with a full or failed disk disables it.
func disabledIn(ctx context.Context, servers []serverState) (problems []string) {
	for _, s := range servers {
		if s.Disabled {
			var described struct {
				Name string `json:"server_name"`
			}
			_ = getMonitoring(ctx, s.url+"/varz", &described) // Without its name, the URL identifies the server.
			problems = append(problems, fmt.Sprintf("JetStream is disabled in %s: check its disk, restart it", cmp.Or(described.Name, s.url)))
		}
	}
	return problems
}

// extent describes the messages that a server has of a stream.
type extent struct{ messages, first, last uint64 }

func extentOf(s jetstream.StreamState) extent { return extent{s.Msgs, s.FirstSeq, s.LastSeq} }

// missing returns the number of messages between the first and the last one that the server lacks.
func (e extent) missing() uint64 {
	if e.messages == 0 {
		return 0
	}
	return e.last - e.first + 1 - e.messages
}

// extents are a reading of a stream: of its leader, and of servers, by name.
type extents struct {
	leader  extent
	servers map[string]extent
}

// readExtents returns the reading of a stream. The leader has answered before the servers.
func readExtents(leader *jetstream.StreamInfo, servers []serverState) extents {
	r := extents{leader: extentOf(leader.State), servers: map[string]extent{}}
	if leader.Cluster == nil {
		return r // A single server.
	}
	r.servers[leader.Cluster.Leader] = r.leader
	for _, s := range servers {
		for _, a := range s.Accounts {
			for _, found := range a.Streams {
				// Another account can have a stream of the same name.
				if found.Config.Name == leader.Config.Name && found.Created.Equal(leader.Created) {
					r.servers[nameOf(leader.Cluster, found.Cluster, s.url)] = extentOf(found.State)
				}
			}
		}
	}
	return r
}

// nameOf returns the name of the server whose monitoring port shows a cluster: the leader's shows all
// servers, and a server's all others.
func nameOf(all, others *jetstream.ClusterInfo, url string) string {
	if others == nil {
		return url
	}
	left := map[string]bool{all.Leader: true}
	for _, r := range all.Replicas {
		left[r.Name] = true
	}
	for _, r := range others.Replicas {
		delete(left, r.Name)
	}
	for name := range left {
		if len(left) == 1 {
			return name
		}
	}
	return url
}

// lacking returns the servers that lack messages, with their number, by two readings that are some seconds apart.
// In the stream of a slot, a server is behind under load, and removes records at another moment than the others.
// So only what is the same in both readings counts:
//
//   - records are missing between the first and the last one, because nothing removes single records;
//   - the first record is later than the leader's;
//   - the last record is older than the one that the leader had at the first reading. isCurrent is false for a
//     server that the leader knows to be behind.
func lacking(before, now extents, isCurrent func(server string) bool) map[string]uint64 {
	found := map[string]uint64{}
	for name, e := range now.servers {
		earlier, ok := before.servers[name]
		if !ok {
			continue
		}
		n := uint64(0)
		if earlier.missing() > 0 {
			n += e.missing()
		}
		if e.first == earlier.first && e.first > max(now.leader.first, before.leader.first) {
			n += e.first - now.leader.first
		}
		if e.last == earlier.last && e.last < before.leader.last && isCurrent(name) {
			n += before.leader.last - e.last
		}
		if n > 0 {
			found[name] = n
		}
	}
	return found
}

// differing is lacking for an object store, whose messages are removed singly. It compares only what no server has
// changed between the readings, with what most servers have.
func differing(before, now extents) map[string]uint64 {
	found := map[string]uint64{}
	if now.leader != before.leader {
		return found
	}
	count := map[extent]int{}
	var most extent
	for _, e := range now.servers {
		count[e]++
	}
	for e, n := range count {
		if n > count[most] || n == count[most] && e.messages > most.messages {
			most = e
		}
	}
	for name, e := range now.servers {
		if e != most && before.servers[name] == e {
			found[name] = max(1, most.messages-min(most.messages, e.messages))
		}
	}
	return found
}
