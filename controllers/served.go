package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// servedKinds follows which kinds the API server serves. With the CustomResourceDefinition of a kind the API
// server deletes all of its objects, which is no deletion by their owners.
//
// The deletion timestamp of the definition is set before the first object is deleted, so a read of the
// definition after the deletion of an object shows the reason.
type servedKinds struct {
	direct   client.Reader
	kinds    kinds.Table
	interval time.Duration
	// changed is called after a kind was removed, restored or replaced.
	changed func()

	mu sync.Mutex
	// uids are the UIDs of the definitions, by section of the kind; "" for a kind that is not served.
	// It is nil before the first read, and never modified.
	uids map[string]string
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: each replica needs it for its readiness.
func (s *servedKinds) NeedLeaderElection() bool { return false }

// Start reads the definitions until ctx is done. It implements manager.Runnable.
func (s *servedKinds) Start(ctx context.Context) error {
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	for {
		if _, err := s.read(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "reading the CustomResourceDefinitions failed; it is retried")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// current returns the result of the last read.
func (s *servedKinds) current(ctx context.Context) (map[string]string, error) {
	s.mu.Lock()
	uids := s.uids
	s.mu.Unlock()
	if uids != nil {
		return uids, nil
	}
	return s.read(ctx)
}

// read returns the UIDs of the present definitions, by section of the kind.
func (s *servedKinds) read(ctx context.Context) (map[string]string, error) {
	uids := map[string]string{}
	for _, k := range s.kinds {
		uid, err := s.definition(ctx, k)
		if err != nil {
			return nil, err
		}
		uids[k.Compile.Section] = uid
	}
	s.mu.Lock()
	before := s.uids
	s.uids = uids
	s.mu.Unlock()
	for _, k := range s.kinds {
		section, served := k.Compile.Section, 1.0
		if uids[section] == "" {
			served = 0
		}
		kindServed.WithLabelValues(k.Name()).Set(served)
		if known, ok := before[section]; served == 0 && (!ok || known != "") {
			log.FromContext(ctx).Info("kind is not served by the API server; its objects are parked, not deleted", "kind", k.Name(), "definition", definitionName(k))
		}
	}
	if before != nil && !maps.Equal(before, uids) {
		s.changed()
	}
	return uids, nil
}

// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,resourceNames=sources.posthorn.dev;webhookdestinations.posthorn.dev;audiences.posthorn.dev;deletionrequests.posthorn.dev;redeliveries.posthorn.dev,verbs=get

// definition returns the UID of a kind's definition; "" if the kind is not served, or only until its objects
// are deleted.
func (s *servedKinds) definition(ctx context.Context, k kinds.Kind) (string, error) {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	err := s.direct.Get(ctx, types.NamespacedName{Name: definitionName(k)}, m)
	if apierrors.IsNotFound(err) || err == nil && m.DeletionTimestamp != nil {
		return "", nil
	}
	if err == nil { // A definition can also exclude the version.
		err = s.direct.List(ctx, k.NewList(), client.Limit(1))
	}
	if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read CustomResourceDefinition %s: %w", definitionName(k), err)
	}
	return string(m.UID), nil
}

// definitionName returns the name of a kind's CustomResourceDefinition.
func definitionName(k kinds.Kind) string {
	plural, _ := meta.UnsafeGuessKindToResource(v1beta1.GroupVersion.WithKind(k.Name()))
	return plural.GroupResource().String()
}

// check is a check of readiness.
func (s *servedKinds) check(*http.Request) error {
	s.mu.Lock()
	uids := s.uids
	s.mu.Unlock()
	if uids == nil {
		return errors.New("the CustomResourceDefinitions have not been read yet; check that the operator may get them")
	}
	var gone []string
	for _, k := range s.kinds {
		if uids[k.Compile.Section] == "" {
			gone = append(gone, k.Name())
		}
	}
	if len(gone) == 0 {
		return nil
	}
	slices.Sort(gone)
	return fmt.Errorf("the API server does not serve %s: apply the CustomResourceDefinitions, then the objects; until then their messages are kept for 7 days, and not sent", strings.Join(gone, ", "))
}
