package controllers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// verdictCache holds the newest verdicts of each namespace. The config controller
// sets them, the status controller reads them.
type verdictCache struct {
	mu          sync.Mutex
	byNamespace map[string]verdictsByUID
}

// verdictsByUID are the verdicts of a namespace's objects.
type verdictsByUID map[types.UID]generationVerdict

// generationVerdict is the verdict on one generation of an object. It does not
// apply to other generations.
type generationVerdict struct {
	generation int64
	compile.Verdict
}

func newVerdictCache() *verdictCache {
	return &verdictCache{byNamespace: map[string]verdictsByUID{}}
}

func (c *verdictCache) set(namespace string, verdicts verdictsByUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byNamespace[namespace] = verdicts
}

func (c *verdictCache) remove(namespace string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byNamespace, namespace)
}

func (c *verdictCache) get(namespace string) (verdictsByUID, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	verdicts, ok := c.byNamespace[namespace]
	return verdicts, ok
}

func (c *verdictCache) namespaces() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.byNamespace))
}

// objects are the objects of a namespace, by the index of their kind in the table.
type objects [][]compile.Object

// listNamespace lists a namespace's objects of all kinds.
func listNamespace(ctx context.Context, r client.Reader, table kinds.Table, namespace string,
	options ...client.ListOption) (objects, error) {
	all := make(objects, len(table))
	options = append(options, client.InNamespace(namespace))
	for i, k := range table {
		list := k.NewList()
		if err := r.List(ctx, list, options...); err != nil {
			return nil, fmt.Errorf("list the objects of namespace %s: %w", namespace, err)
		}
		all[i] = kinds.Objects(list)
	}
	return all, nil
}

// snapshot returns the objects as the input of the compiler.
func (o objects) snapshot(namespace string) compile.Snapshot {
	s := compile.Snapshot{Namespace: namespace}
	for _, ofKind := range o {
		s.Objects = append(s.Objects, ofKind...)
	}
	return s
}

// verdicts returns the verdicts on the objects by UID.
func (o objects) verdicts(table kinds.Table, v compile.Verdicts) verdictsByUID {
	all := verdictsByUID{}
	for i, k := range table {
		for _, object := range o[i] {
			all[object.GetUID()] = generationVerdict{object.GetGeneration(), v[k.Compile.Section][object.GetName()]}
		}
	}
	return all
}
