package controllers

import (
	"context"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// configInputs reads what the live configs are compiled from, and keeps what compilations share.
type configInputs struct {
	client  client.Reader // reads from the cache
	direct  client.Reader // reads from the API server
	kinds   kinds.Table
	policy  compile.Policy
	secrets *secretReader

	mu sync.Mutex
	// memos are the results of the last compilations. Only the reconciliation of a namespace uses
	// its memo, and there is one at a time.
	memos map[string]*compile.Memo
	// expressions has the expressions of all namespaces from the start.
	expressions compile.Expressions
}

// gather reads a namespace's objects, and the Secrets and ConfigMaps that they refer to.
func (i *configInputs) gather(ctx context.Context, namespace string) (objects, compile.Snapshot, error) {
	// The compiler does not change its input, so the objects of the cache need no copies.
	all, err := listNamespace(ctx, i.client, i.kinds, namespace, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, compile.Snapshot{}, err
	}
	s := all.snapshot(namespace)
	s.Policy = i.policy
	s.Secrets, err = i.secrets.read(ctx, namespace, i.kinds.Compilers().SecretRefs(s.Objects...))
	return all, s, err
}

// memoOf returns the memo of a namespace.
func (i *configInputs) memoOf(namespace string) *compile.Memo {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.memos[namespace] == nil {
		i.memos[namespace] = &compile.Memo{}
	}
	return i.memos[namespace]
}

// setExpressions records the expressions of a namespace. It returns those above a budget, and the namespaces whose
// expressions may fit now.
func (i *configInputs) setExpressions(namespace string, objects []compile.Object) (over map[string]string, again []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	again = i.expressions.Set(map[string][]compile.Object{namespace: objects})
	return i.expressions.Over(namespace), again
}

// setAllExpressions records the expressions of all namespaces at the start.
func (i *configInputs) setAllExpressions(objects map[string][]compile.Object) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.expressions.Set(objects)
}

// forget removes the data about a namespace without objects. It returns the namespaces whose expressions may fit now.
func (i *configInputs) forget(namespace string) (again []string) {
	i.secrets.forget(namespace)
	_, again = i.setExpressions(namespace, nil)
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.memos, namespace)
	return again
}

// all lists the objects of all namespaces.
func (i *configInputs) all(ctx context.Context) (map[string][]compile.Object, error) {
	objects := map[string][]compile.Object{}
	for _, k := range i.kinds {
		list := k.NewList()
		if err := i.client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list all objects: %w", err)
		}
		for _, o := range kinds.Objects(list) {
			objects[o.GetNamespace()] = append(objects[o.GetNamespace()], o)
		}
	}
	return objects, nil
}

// confirmNone returns an error if the API server has objects in a namespace, or does not answer: the cache may lag.
// served are the kinds that it serves.
func (i *configInputs) confirmNone(ctx context.Context, namespace string, served map[string]string) error {
	for _, k := range i.kinds {
		list := k.NewList()
		if err := i.direct.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); apierrors.IsNotFound(err) &&
			served[k.Compile.Section] == "" {
			continue
		} else if err != nil {
			return fmt.Errorf("confirm that namespace %s has no objects: %w", namespace, err)
		}
		if meta.LenList(list) > 0 {
			return fmt.Errorf("the cache of namespace %s lags behind the API server", namespace)
		}
	}
	return nil
}
