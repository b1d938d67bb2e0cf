// Package kinds is the table of the kinds. The operator, `posthorn run` and `posthorn
// compile` process the objects of every kind in it in the same way:
//
//	list -> verdict and live config (compile) -> report -> status (health) -> deletion at the end of the TTL
//
// CONTRIBUTING.md lists what a new kind needs beside its row in All.
package kinds

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
)

// List is a list of objects of one kind.
type List interface {
	metav1.ListInterface
	runtime.Object
}

// Kind is a row of the table.
type Kind struct {
	// New and NewList return an empty object and an empty list of the kind.
	New     func() compile.Object
	NewList func() List
	Compile compile.Kind
	Health  health.Kind
	// Input describes the part of an object's status that the compiler reads; nil if it
	// reads nothing that the operator writes. Objects are compiled again when it changes.
	Input func(compile.Object) string
}

// Name returns the kind's name in the API.
func (k Kind) Name() string { return k.Health.Name }

// Table is a set of kinds.
type Table []Kind

// All are the kinds of the API, in the order in which they are compiled: the verdicts of
// Sources refer to the verdicts of destinations.
var All = Table{
	{New: newObject[v1beta1.WebhookDestination], NewList: newList[v1beta1.WebhookDestinationList], Compile: compile.Destinations,
		Health: health.Destinations},
	{New: newObject[v1beta1.Source], NewList: newList[v1beta1.SourceList], Compile: compile.Sources, Health: health.Sources},
	{New: newObject[v1beta1.Audience], NewList: newList[v1beta1.AudienceList], Compile: compile.Audiences, Health: health.Audiences},
	{New: newObject[v1beta1.DeletionRequest], NewList: newList[v1beta1.DeletionRequestList], Compile: compile.Deletions,
		Health: health.DeletionRequests, Input: func(o compile.Object) string {
			return fmt.Sprint(v1beta1.JobEnded(o.(*v1beta1.DeletionRequest).Status.JobStatus))
		}},
	{New: newObject[v1beta1.Redelivery], NewList: newList[v1beta1.RedeliveryList], Compile: compile.Redeliveries,
		Health: health.Redeliveries, Input: func(o compile.Object) string {
			return string(compile.RedeliveryPhase(o.(*v1beta1.Redelivery)))
		}},
}

func newObject[T any, O interface {
	*T
	compile.Object
}]() compile.Object {
	return O(new(T))
}

func newList[T any, O interface {
	*T
	List
}]() List {
	return O(new(T))
}

// Compilers returns the compile.Table of the kinds.
func (t Table) Compilers() compile.Table {
	var table compile.Table
	for _, k := range t {
		table = append(table, k.Compile)
	}
	return table
}

// ByName returns the kind with a name in the API; nil if there is none.
func (t Table) ByName(name string) *Kind {
	for i := range t {
		if t[i].Name() == name {
			return &t[i]
		}
	}
	return nil
}

// String returns the names of the kinds.
func (t Table) String() string {
	var names []string
	for _, k := range t {
		names = append(names, k.Name())
	}
	return strings.Join(names, ", ")
}

// Objects returns the items of a list.
func Objects(list List) (objects []compile.Object) {
	_ = meta.EachListItem(list, func(o runtime.Object) error { // No item returns an error.
		objects = append(objects, o.(compile.Object))
		return nil
	})
	return objects
}
