package replicated

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
)

// configs are the live configs of processes of posthorn dispatcher, which are compiled from a folder of manifests.
type configs struct {
	folder, kubeconfig string
	change             func(namespace string, to liveconfig.Stored)
	// revisions are those of the destinations that were published last.
	revisions map[string]string
}

// compile starts an API server with the live configs of manifests.
func (w *world) compile(manifests map[string]string) {
	w.t.Helper()
	e, _ := env.For(w.t)
	w.configs = &configs{folder: w.t.TempDir(), kubeconfig: e.Kubeconfig(), revisions: map[string]string{}}
	for name, text := range manifests {
		check.NoError(w.t, "write a manifest", process.Replace(filepath.Join(w.configs.folder, name), text))
	}
	w.configs.change = storeConfigs(w.t, e, w.compiled())
}

// publish changes the live configs to those of the newest manifests.
func (w *world) publish() {
	for _, namespace := range namespaces {
		check.NoError(w.t, "write a manifest", process.Replace(filepath.Join(w.configs.folder, namespace+".yaml"), w.manifest(namespace)))
	}
	for namespace, stored := range w.compiled() {
		w.configs.change(namespace, stored)
	}
}

// compiled compiles the manifests.
func (w *world) compiled() map[string]liveconfig.Stored {
	all, err := standalone.Compile(w.configs.folder, nil, compile.Policy{})
	check.NoError(w.t, "compile the manifests", err)
	stored := map[string]liveconfig.Stored{}
	for _, n := range all.Namespaces {
		stored[n.Namespace] = storedConfig(w.t, n.Config)
		for _, d := range n.Config.Destinations {
			w.configs.revisions[n.Namespace+"/"+d.Name] = d.Revision
		}
	}
	return stored
}

// confirmedInSlots returns an error unless the owner of a slot uses the newest revision of a destination.
func (w *world) confirmedInSlots(to *target) error {
	p := w.owner(time.Second)
	if p == nil {
		return errors.New("no process owns a slot")
	}
	reports, err := p.namespaces(w.t.Context())
	for _, n := range reports {
		for _, d := range n.Destinations {
			if n.Namespace+"/"+d.Name == to.id() && d.Revision == w.configs.revisions[to.id()] {
				return nil
			}
		}
	}
	return fmt.Errorf("destination %s is not at revision %s: %w", to.id(), w.configs.revisions[to.id()], err)
}
