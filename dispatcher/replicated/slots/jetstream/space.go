package jetstream

import (
	"context"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// checkSpace returns an error if the account, or the servers that the monitoring ports show, lack the space for
// the missing streams of a number of slots. JetStream reserves the size of a stream, and a stream that was created
// before one that does not fit remains, so this is checked before the first one.
func (c *Client) checkSpace(ctx context.Context, number int) error {
	need, err := c.missing(ctx, number)
	if err != nil || need == 0 {
		return err
	}
	js, err := jetstream.New(c.nc)
	if err != nil {
		return err
	}
	account, err := js.AccountInfo(ctx)
	if err != nil {
		return explain(fmt.Errorf("read the limits of the account: %w", err))
	}
	if err := c.fitsAccount(account, need); err != nil {
		return err
	}
	if c.c.Monitoring == "" {
		return nil
	}
	servers, err := c.readServers(ctx)
	if err != nil {
		return err
	}
	return c.fitsServers(servers, need)
}

// missing returns the bytes that each server reserves for the streams of a number of slots that do not exist.
func (c *Client) missing(ctx context.Context, number int) (need int64, err error) {
	for slot := range number {
		complete, err := c.exists(ctx, objectsPrefix+c.members(slot)) // It is created last.
		if err != nil {
			return 0, err
		}
		if complete {
			continue
		}
		need += c.c.MaxBytes
		for name, bytes := range map[string]int64{objectsPrefix + c.slotStream(slot): 3 * c.c.MaxBytes, c.slotStream(slot): c.c.MaxBytes} {
			switch exists, err := c.exists(ctx, name); {
			case err != nil:
				return 0, err
			case !exists:
				need += bytes
			}
		}
	}
	return need, nil
}

const spaceFix = "; raise it, or use smaller streams (--replication-max-bytes, replication.jetStream.maxBytes in the chart) or fewer slots"

// fitsAccount returns an error if bytes in each of the replicas exceed the limit of an account.
func (c *Client) fitsAccount(account *jetstream.AccountInfo, bytes int64) error {
	tier := account.Tier
	if t, ok := account.Tiers[fmt.Sprintf("R%d", c.c.Replicas)]; ok {
		tier = t
	} else {
		bytes *= int64(c.c.Replicas) // A limit without tiers counts each copy.
	}
	if limit := tier.Limits.MaxStore; limit >= 0 && bytes > limit-int64(tier.ReservedStore) {
		return fmt.Errorf("the log needs %s, and the limit of the account in the NATS servers is %s, of which %s are reserved"+spaceFix,
			gib(bytes), gib(limit), gib(int64(tier.ReservedStore)))
	}
	return nil
}

// fitsServers returns an error if too few servers have bytes left. It returns none if the servers are not all of
// a cluster.
func (c *Client) fitsServers(servers []serverState, bytes int64) error {
	var full []string
	fit := 0
	for _, s := range servers {
		if s.Meta.Size > len(servers) {
			return nil
		}
		if bytes <= s.Config.MaxStore-max(s.Stored, s.Reserved) {
			fit++
		} else {
			full = append(full, fmt.Sprintf("%s has max_file_store %s, of which %s are reserved", s.url, gib(s.Config.MaxStore), gib(max(s.Stored, s.Reserved))))
		}
	}
	if fit >= c.c.Replicas {
		return nil
	}
	return fmt.Errorf("the log needs %s in each of %d NATS servers: %s"+spaceFix, gib(bytes), c.c.Replicas, strings.Join(full, "; "))
}

func gib(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }
