package standalone

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// serveDiscard deletes the parked objects with a name, and answers with their list; with dryRun it only lists them.
func (c *Control) serveDiscard(w http.ResponseWriter, r *http.Request) {
	namespace, name, dryRun := r.FormValue("namespace"), r.FormValue("name"), r.FormValue("dryRun") == "true"
	found := []string{}
	c.refresh(r.Context())
	if err := c.inRun(r.Context(), func() { found = c.discard(namespace, name, dryRun) }); err != nil {
		http.Error(w, "this process does not run the manifests at the moment; send the request again", http.StatusServiceUnavailable)
		return
	}
	if !dryRun && len(found) > 0 {
		c.log.Info("audit: parked objects discarded", "user", cmp.Or(adminapi.CallerOf(r.Context()).User, "unauthenticated"), "remoteAddr",
			r.RemoteAddr, "namespace", namespace, "objects", found)
	}
	write(w, http.StatusOK, found)
}

// inRun calls a function in the goroutine of Run, and waits for its end.
func (c *Control) inRun(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	select {
	case c.calls <- func() { fn(); close(done) }:
	case <-c.ended:
		return context.Canceled
	case <-ctx.Done():
		return ctx.Err()
	}
	<-done
	return nil
}

// kindOfRef returns the kind of a reference.
func kindOfRef(r liveconfig.Ref) string {
	i := slices.IndexFunc(kinds.All, func(k kinds.Kind) bool { return k.Compile.Section == r.Section })
	return kinds.All[i].Name()
}

// discard returns the parked objects with a name. Without dryRun they get tombstones, as if their manifests had been
// removed now.
func (c *Control) discard(namespace, name string, dryRun bool) (found []string) {
	found = []string{}
	var refs []liveconfig.Ref
	for _, p := range c.dispatcher.Config(namespace).Parked {
		var r liveconfig.Ref
		if r.UnmarshalText([]byte(p.Object)) == nil && r.Name == name {
			refs = append(refs, r)
			found = append(found, kindOfRef(r)+" "+namespace+"/"+name)
		}
	}
	for o := range c.store.records {
		if o.namespace == namespace && o.name == name && !slices.Contains(found, o.String()) {
			found = append(found, o.String())
		}
	}
	slices.Sort(found)
	if dryRun || len(found) == 0 {
		return found
	}
	c.mu.Lock()
	maps.DeleteFunc(c.store.records, func(o id, _ record) bool { return slices.Contains(found, o.String()) })
	c.store.parked = c.store.parkedProblems(time.Now())
	c.mu.Unlock()
	sent, known := c.sent[namespace]
	if !known { // The whole namespace is missing. Since: the other objects remain parked.
		number := c.dispatcher.Config(namespace).Number
		sent.history = compile.HistoryOf(liveconfig.Revisioned{
			Config: liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: namespace},
			Head:   liveconfig.Head{Number: number, Since: number + 1},
		})
		sent.history.Verified = true
	}
	sent.history = sent.history.Bury(refs)
	c.sent[namespace] = sent
	delete(c.compiled, namespace)
	c.apply()
	return found
}
