//! Conversion between trained tensors in memory and in files, where the layouts differ.
//!
//! In memory, a layer's experts are two tensors; a file may store them one by one or transposed,
//! and readers of the trained model expect the layout of the base. PEFT puts the columns of all
//! experts' B side by side, rank first.

use crate::build::ExpertTensor;
use crate::experts::{Experts, ExpertsLayout, ExpertsShape, Projection};
use crate::source::WeightSource;
use isobit_proof::safetensors::NamedTensor;

/// A trained tensor apart from its values: its name and shape in memory, and how files store it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// None if a file stores it as it is in memory.
    pub(crate) form: Option<Form>,
}

impl TrainedTensor {
    /// Number of values.
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether a file holds its values in another layout than memory.
    pub fn is_reordered(&self) -> bool {
        self.form.is_some()
    }

    /// Names and shapes of its tensors in a file.
    pub fn in_file(&self) -> Vec<(String, Vec<usize>)> {
        match &self.form {
            Some(form) => form.tensors(&self.name),
            None => vec![(self.name.clone(), self.shape.clone())],
        }
    }

    /// Its values as the tensors of a file.
    pub fn to_file(&self, values: Vec<f32>) -> Vec<NamedTensor> {
        match &self.form {
            Some(form) => form.write(&self.name, &values),
            None => vec![NamedTensor { name: self.name.clone(), shape: self.shape.clone(), values }],
        }
    }

    /// Its values from the tensors of a file, which `find` returns by name and shape.
    pub fn from_file<E>(&self, mut find: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>) -> Result<Vec<f32>, E> {
        match &self.form {
            Some(form) => form.read(&self.name, find),
            None => find(&self.name, &self.shape),
        }
    }
}

/// How a parameter is stored in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// B of experts' adapters: `[experts, outputs, rank]` in memory, `[outputs, rank·experts]` in
    /// the file.
    RankMajor { experts: usize, outputs: usize, rank: usize },
    /// Factors of experts' adapters, one pair per matrix of each expert, with the name prefix
    /// `start`. Gate and up are diagonal blocks of one B: `[experts, 2·width, 2·rank]` in memory.
    Factors { start: String, part: ExpertTensor, factor: Factor, shape: ExpertsShape, rank: usize },
    /// One tensor per matrix of each expert; `start` is their name prefix, `modules` are the file's
    /// names of the matrices.
    Single { start: String, modules: Vec<String>, part: ExpertTensor, shape: ExpertsShape },
    /// The matrices of all experts, transposed.
    Transposed { part: ExpertTensor, shape: ExpertsShape },
}

/// One of an adapter's two factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Factor {
    A,
    B,
}

impl Factor {
    fn name(self) -> &'static str {
        match self {
            Self::A => "lora_A",
            Self::B => "lora_B",
        }
    }

    fn shape(self, [outputs, inputs]: [usize; 2], rank: usize) -> [usize; 2] {
        match self {
            Self::A => [rank, inputs],
            Self::B => [outputs, rank],
        }
    }
}

impl Form {
    /// The form in which trained experts match the layout of the base file; none if that is the
    /// layout in memory.
    pub(crate) fn of_experts(
        source: &dyn WeightSource,
        path: &str,
        part: ExpertTensor,
        loaded: &Experts,
    ) -> Option<Self> {
        let Experts::Stored(stored) = loaded else { return None };
        let shape = stored.shape();
        match stored.layout() {
            ExpertsLayout::Fused => None,
            ExpertsLayout::Transposed => Some(Self::Transposed { part, shape }),
            ExpertsLayout::PerExpert => {
                let start = source.name_in_file(&format!("{path}.experts.")).to_string();
                let module = |projection: &Projection| {
                    let name = format!("{path}.experts.0.{}", projection.module());
                    source.name_in_file(&name)[start.len() + "0.".len()..].to_string()
                };
                let modules = part.projections().iter().map(module).collect();
                Some(Self::Single { start, modules, part, shape })
            }
        }
    }

    /// Names and shapes of the tensors in the file.
    pub(crate) fn tensors(&self, name: &str) -> Vec<(String, Vec<usize>)> {
        match self {
            Self::RankMajor { experts, outputs, rank } => vec![(name.to_string(), vec![*outputs, rank * experts])],
            Self::Transposed { part, shape } => {
                let [rows, columns] = part.shape(*shape);
                vec![(name.to_string(), vec![shape.experts, columns, rows])]
            }
            Self::Factors { start, part, factor, shape, rank } => {
                let of = |expert: usize| {
                    part.projections().iter().map(move |projection| {
                        let name = format!("{start}{expert}.{}.{}.weight", projection.module(), factor.name());
                        (name, factor.shape(projection.shape(*shape), *rank).to_vec())
                    })
                };
                (0..shape.experts).flat_map(of).collect()
            }
            Self::Single { start, modules, part, shape } => {
                let of = |expert: usize| {
                    part.projections().iter().zip(modules).map(move |(projection, module)| {
                        (format!("{start}{expert}.{module}.weight"), projection.shape(*shape).to_vec())
                    })
                };
                (0..shape.experts).flat_map(of).collect()
            }
        }
    }

    /// Elements in memory per element in the file; the rest are zero.
    fn expansion(&self) -> usize {
        match self {
            Self::Factors { part, factor: Factor::B, .. } => part.projections().len(),
            _ => 1,
        }
    }

    /// The index in memory of every element, in the order of the file's tensors.
    fn places(&self) -> Box<dyn Iterator<Item = usize>> {
        match *self {
            Self::RankMajor { experts, outputs, rank } => Box::new((0..outputs).flat_map(move |output| {
                (0..rank * experts).map(move |column| {
                    let (j, expert) = (column / experts, column % experts);
                    (expert * outputs + output) * rank + j
                })
            })),
            Self::Transposed { part, shape } => {
                let [rows, columns] = part.shape(shape);
                Box::new((0..shape.experts * columns).flat_map(move |line| {
                    let (expert, column) = (line / columns, line % columns);
                    (0..rows).map(move |row| (expert * rows + row) * columns + column)
                }))
            }
            Self::Factors { part, factor, shape, rank, .. } => {
                let parts = part.projections().len();
                let [rows, columns] = factor.shape(part.projections()[0].shape(shape), rank);
                // In memory, blocks of B also lie side by side; those of A are only stacked.
                let across = if factor == Factor::B { parts } else { 1 };
                Box::new((0..shape.experts * parts * rows).flat_map(move |row| {
                    let block = row / rows % parts % across;
                    (0..columns).map(move |column| (row * across + block) * columns + column)
                }))
            }
            // Gate, then up, expert by expert: the order in memory.
            Self::Single { part, shape, .. } => {
                let [rows, columns] = part.shape(shape);
                Box::new(0..shape.experts * rows * columns)
            }
        }
    }

    /// From memory to file.
    pub(crate) fn write(&self, name: &str, values: &[f32]) -> Vec<NamedTensor> {
        let mut places = self.places();
        let tensors = self.tensors(name).into_iter();
        tensors
            .map(|(name, shape)| {
                let length = shape.iter().product();
                let values = places.by_ref().take(length).map(|place| values[place]).collect();
                NamedTensor { name, shape, values }
            })
            .collect()
    }

    /// From file to memory; `find` returns each of `tensors`.
    pub(crate) fn read<E>(
        &self,
        name: &str,
        mut find: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<f32>, E> {
        let mut in_file = Vec::new();
        for (name, shape) in self.tensors(name) {
            in_file.extend(find(&name, &shape)?);
        }
        let mut values = vec![0.0; in_file.len() * self.expansion()];
        for (place, value) in self.places().zip(in_file) {
            values[place] = value;
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(start: &str, part: ExpertTensor, shape: ExpertsShape) -> Form {
        let modules = part.projections().iter().map(|projection| projection.module().to_string()).collect();
        Form::Single { start: start.to_string(), modules, part, shape }
    }

    /// Element `(o, j·E + e)` of the file is B of expert `e` at `(o, j)`.
    #[test]
    fn rank_comes_before_expert_in_a_file() {
        let form = Form::RankMajor { experts: 3, outputs: 2, rank: 2 };
        let at = |e: usize, o: usize, j: usize| (100 * e + 10 * o + j) as f32;
        let mut memory = Vec::new();
        for e in 0..3 {
            for o in 0..2 {
                memory.extend((0..2).map(|j| at(e, o, j)));
            }
        }
        let written = form.write("b", &memory);
        assert_eq!((written.len(), written[0].shape.as_slice()), (1, [2, 6].as_slice()));
        for o in 0..2 {
            for (j, e) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
                assert_eq!(written[0].values[o * 6 + j * 3 + e].to_bits(), at(e, o, j).to_bits());
            }
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let shape = ExpertsShape { experts: 3, width: 2, hidden: 5 };
        let start = "mlp.experts.";
        for form in [
            Form::RankMajor { experts: 2, outputs: 5, rank: 6 },
            single(start, ExpertTensor::GateUp, shape),
            single(start, ExpertTensor::Down, shape),
            Form::Transposed { part: ExpertTensor::GateUp, shape },
            Form::Transposed { part: ExpertTensor::Down, shape },
        ] {
            let length: usize = form.tensors("x").iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            let memory: Vec<f32> = (0..length).map(|at| at as f32).collect();
            let written = form.write("x", &memory);
            let read = form.read("x", |name, shape| {
                let tensor = written.iter().find(|tensor| tensor.name == name && tensor.shape == shape);
                tensor.map(|tensor| tensor.values.clone()).ok_or(())
            });
            assert_eq!(read, Ok(memory), "{form:?}");
        }
    }

    #[test]
    fn adapters_of_gate_and_up_are_blocks_on_a_diagonal() {
        let shape = ExpertsShape { experts: 2, width: 3, hidden: 5 };
        let factors = |part, factor| Form::Factors { start: "e.".to_string(), part, factor, shape, rank: 2 };
        let both = factors(ExpertTensor::GateUp, Factor::B);
        let names = both.tensors("b").into_iter().map(|(name, shape)| format!("{name} {shape:?}"));
        let wanted = ["e.0.gate_proj", "e.0.up_proj", "e.1.gate_proj", "e.1.up_proj"];
        assert_eq!(names.collect::<Vec<_>>(), wanted.map(|name| format!("{name}.lora_B.weight [3, 2]")));
        // Rows of gate in the first two columns, rows of up in the last two.
        let read = both.read::<()>("b", |_, shape| Ok(vec![1.0; shape.iter().product()])).expect("made here");
        let row = |up: bool| if up { [0.0, 0.0, 1.0, 1.0] } else { [1.0, 1.0, 0.0, 0.0] };
        let expected: Vec<f32> = (0..12).flat_map(|at| row(at / 3 % 2 == 1)).collect();
        assert_eq!(read, expected);
        for form in [
            both,
            factors(ExpertTensor::GateUp, Factor::A),
            factors(ExpertTensor::Down, Factor::A),
            factors(ExpertTensor::Down, Factor::B),
        ] {
            let length: usize = form.tensors("x").iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            let mut next = 0;
            let memory = form.read::<()>("x", |_, shape| {
                let from = next;
                next += shape.iter().product::<usize>();
                Ok((from..next).map(|at| at as f32 + 1.0).collect())
            });
            let written = form.write("x", &memory.expect("made here"));
            let values: Vec<f32> = written.into_iter().flat_map(|tensor| tensor.values).collect();
            assert_eq!(values, (0..length).map(|at| at as f32 + 1.0).collect::<Vec<_>>(), "{form:?}");
        }
    }

    #[test]
    fn experts_are_written_one_by_one() {
        let shape = ExpertsShape { experts: 2, width: 1, hidden: 2 };
        let form = single("e.", ExpertTensor::GateUp, shape);
        let written = form.write("e.gate_up_proj", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let names: Vec<&str> = written.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["e.0.gate_proj.weight", "e.0.up_proj.weight", "e.1.gate_proj.weight", "e.1.up_proj.weight"]);
        assert_eq!((written[2].shape.clone(), written[2].values.clone()), (vec![1, 2], vec![5.0, 6.0]));
    }
}
