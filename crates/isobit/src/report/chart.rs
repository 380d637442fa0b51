//! A chart: curves over the steps of a run, as inline SVG that stretches with the page, with its
//! labels as text around it, so that they stay legible at any width.
//!
//! A long curve is thinned to the median of each bucket of steps, in front of its smallest and its
//! largest value in a lighter colour, so that a spike stays visible.

use super::axis::{Axis, Base, short};
use super::html::{escaped, put};
use std::fmt::Write;

/// Buckets of a thinned curve: about two pixels of a wide page each.
const BUCKETS: usize = 480;
/// Curves with at most this many points have their points marked.
const DOTS_MAX: usize = 40;
/// Size of the drawing's own coordinates.
const SIDE: f64 = 10_000.0;
/// Least distance of two labels at the end of curves, as a share of the height.
const LABEL_DISTANCE: f64 = 0.07;

pub(super) type Point = (u64, f64);

/// One curve.
pub(super) struct Series {
    /// Number of its colour.
    pub(super) colour: usize,
    /// At the end of the curve.
    pub(super) label: String,
    /// Above the chart.
    pub(super) name: String,
    pub(super) dashed: bool,
    /// By step.
    pub(super) points: Vec<Point>,
}

pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) base: Base,
    pub(super) tall: bool,
    pub(super) series: Vec<Series>,
    /// A step to mark, with its text.
    pub(super) mark: Option<(u64, String)>,
}

impl Chart {
    /// Empty if there is no point.
    pub(super) fn html(&self) -> String {
        let series: Vec<&Series> = self.series.iter().filter(|series| !series.points.is_empty()).collect();
        let steps = series.iter().flat_map(|series| series.points.iter().map(|(step, _)| *step));
        let (Some(first), Some(last)) = (steps.clone().min(), steps.max()) else { return String::new() };
        let x = Axis::of_steps(first, last, if self.tall { 8 } else { 4 });
        let values = series.iter().flat_map(|series| series.points.iter().map(|(_, value)| *value));
        let y = Axis::of_values(values, self.base, if self.tall { 5 } else { 4 });
        let (mut out, tall) = (String::new(), if self.tall { " tall" } else { "" });
        put!(out, "<figure class=\"card{tall}\">\n<figcaption><h2>{}</h2>", self.title);
        put_key(&mut out, &series, &y);
        let labels = y.ticks.iter().map(|tick| y.label(*tick)).collect::<Vec<_>>();
        let widest = |texts: &mut dyn Iterator<Item = &String>| texts.map(|text| text.chars().count()).max();
        let (left, right) = (widest(&mut labels.iter()), widest(&mut series.iter().map(|series| &series.label)));
        let (left, right) = (left.unwrap_or(1), right.unwrap_or(0));
        put!(out, "</figcaption>\n<div class=\"plot\" style=\"--y:{left};--end:{right}\"><div class=\"axis\">");
        for (tick, label) in y.ticks.iter().zip(&labels) {
            put!(out, "<span style=\"top:{}\">{label}</span>", percent(y.place(*tick).map(|place| 1.0 - place)));
        }
        put!(out, "</div><div class=\"area\">");
        self.put_drawing(&mut out, &series, &x, &y);
        for (index, tick) in x.ticks.iter().enumerate() {
            // Every second label gives way on a narrow page.
            let wide = if self.tall && x.ticks.len() > 5 && index % 2 == 1 { " class=\"wide\"" } else { "" };
            put!(out, "<span{wide} style=\"left:{}\">{}</span>", percent(x.place(*tick)), x.label(*tick));
        }
        put!(out, "<em>step</em>");
        put_end_labels(&mut out, &series, &y);
        if let Some((step, text)) = &self.mark {
            let place = x.place(*step as f64).unwrap_or(0.0);
            let side = if place > 0.5 { " class=\"left\"" } else { "" };
            put!(out, "<u{side} style=\"left:{}\">{}</u>", percent(Some(place)), escaped(text));
        }
        put!(out, "</div></div>\n</figure>\n");
        out
    }

    fn put_drawing(&self, out: &mut String, series: &[&Series], x: &Axis, y: &Axis) {
        let side = SIDE as u32;
        put!(
            out,
            "<svg viewBox=\"0 0 {side} {side}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
            self.title
        );
        put!(out, "<path class=\"rule\" d=\"");
        for tick in &y.ticks {
            put!(out, "M0 {}h{side}", down(y.place(*tick)));
        }
        put!(out, "\"/><path class=\"base\" d=\"M0 {side}h{side}\"/>");
        if let Some((step, _)) = &self.mark {
            put!(out, "<path class=\"when\" d=\"M{} 0v{side}\"/>", across(x.place(*step as f64)));
        }
        for Series { colour, dashed, points, .. } in series {
            let drawn = Drawn::of(points, x, y);
            let dash = if *dashed { " dash" } else { "" };
            if !drawn.range.is_empty() {
                put!(out, "<path class=\"curve range s{colour}\" d=\"{}\"/>", drawn.range);
            }
            put!(out, "<path class=\"curve s{colour}{dash}\" d=\"{}\"/>", drawn.curve);
            if points.len() <= DOTS_MAX {
                put!(out, "<path class=\"dots s{colour}\" d=\"{}\"/>", drawn.dots);
            }
            if !drawn.bad.is_empty() {
                put!(out, "<path class=\"bad\" d=\"{}\"/>", drawn.bad);
            }
        }
        put!(out, "</svg>");
    }
}

/// What each curve is, with its last value.
fn put_key(out: &mut String, series: &[&Series], y: &Axis) {
    put!(out, "<span class=\"key\">");
    for Series { colour, name, dashed, points, .. } in series {
        let dash = if *dashed { " dash" } else { "" };
        let last = points.last().map_or(String::new(), |(_, value)| short(*value));
        let swatch = if series.len() > 1 { format!("<i class=\"s{colour}{dash}\"></i>") } else { String::new() };
        put!(out, "<span>{swatch}{} <b>{last}</b></span>", escaped(name));
    }
    if y.is_logarithmic() {
        put!(out, "<span>logarithmic</span>");
    }
    let bad = series.iter().flat_map(|series| &series.points).filter(|(_, value)| !value.is_finite()).count();
    if bad > 0 {
        put!(out, "<span class=\"warn\">not finite at {bad} {}</span>", if bad == 1 { "step" } else { "steps" });
    }
    put!(out, "</span>");
}

/// Names at the right end of the curves, moved apart where they would touch.
fn put_end_labels(out: &mut String, series: &[&Series], y: &Axis) {
    let end = |series: &&&Series| series.points.iter().rev().find_map(|(_, value)| y.place(*value));
    let mut ends: Vec<(f64, &Series)> = series
        .iter()
        .filter_map(|series| Some((1.0 - end(&series)?, *series)))
        .filter(|(_, series)| !series.label.is_empty())
        .collect();
    ends.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    for index in 1..ends.len() {
        ends[index].0 = ends[index].0.max(ends[index - 1].0 + LABEL_DISTANCE);
    }
    // Labels pushed below the axis move up again.
    let mut limit: f64 = 1.0;
    for (place, _) in ends.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - LABEL_DISTANCE;
    }
    for (place, Series { colour, label, .. }) in ends {
        put!(out, "<b class=\"s{colour}\" style=\"top:{}\">{}</b>", percent(Some(place)), escaped(label));
    }
}

/// The paths of one curve.
#[derive(Debug, Default, PartialEq)]
struct Drawn {
    curve: String,
    /// Behind the medians of a long curve: its extremes.
    range: String,
    /// A dot for every point.
    dots: String,
    /// Where values are not finite: a tick at the top.
    bad: String,
}

impl Drawn {
    fn of(points: &[Point], x: &Axis, y: &Axis) -> Self {
        if points.len() <= 2 * BUCKETS {
            let mut drawn = Self { curve: curve(points, x, y), ..Self::default() };
            drawn.put_marks(points, x, y);
            return drawn;
        }
        let extremes = thinned(points, x);
        let (curve, range) = (curve(&medians(points, x), x, y), curve(&extremes, x, y));
        let mut drawn = Self { curve, range, ..Self::default() };
        drawn.put_marks(&extremes, x, y);
        drawn
    }

    /// A dot for every value, and a tick where it is not finite.
    fn put_marks(&mut self, points: &[Point], x: &Axis, y: &Axis) {
        let mut last_bad = None;
        for (step, value) in points {
            let right = across(x.place(*step as f64));
            if let Some(place) = y.place(*value) {
                let _ = write!(self.dots, "M{right} {}h0", down(Some(place)));
            } else if last_bad.replace(right) != Some(right) {
                let _ = write!(self.bad, "M{right} 0v350");
            }
        }
    }
}

/// A line through the points, with gaps where a value is not finite.
fn curve(points: &[Point], x: &Axis, y: &Axis) -> String {
    let (mut path, mut pen_down) = (String::new(), false);
    for (step, value) in points {
        let place = y.place(*value);
        if place.is_some() {
            let _ =
                write!(path, "{}{} {}", if pen_down { " " } else { "M" }, across(x.place(*step as f64)), down(place));
        }
        pen_down = place.is_some();
    }
    path
}

fn buckets<'a>(points: &'a [Point], x: &Axis) -> impl Iterator<Item = &'a [Point]> {
    let bucket = move |point: &Point| (x.place(point.0 as f64).unwrap_or(0.0) * (BUCKETS - 1) as f64) as usize;
    points.chunk_by(move |a, b| bucket(a) == bucket(b))
}

/// The median of the finite values of each bucket, at its middle; a value that is not finite if it
/// has no other.
fn medians(points: &[Point], x: &Axis) -> Vec<Point> {
    let median = |together: &[Point]| {
        let mut values: Vec<f64> = together.iter().map(|(_, value)| *value).filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        (together[together.len() / 2].0, values.get(values.len() / 2).copied().unwrap_or(f64::NAN))
    };
    buckets(points, x).map(median).collect()
}

/// The extremes of each bucket, in their order, and a value that is not finite if there is one.
fn thinned(points: &[Point], x: &Axis) -> Vec<Point> {
    let mut kept = Vec::new();
    for together in buckets(points, x) {
        let finite = || together.iter().enumerate().filter(|(_, (_, value))| value.is_finite());
        let by_value = |a: &(usize, &Point), b: &(usize, &Point)| a.1.1.total_cmp(&b.1.1);
        let bad = together.iter().position(|(_, value)| !value.is_finite());
        let extremes = [finite().min_by(by_value), finite().max_by(by_value)];
        let mut indices: Vec<usize> = extremes.into_iter().flatten().map(|(index, _)| index).chain(bad).collect();
        indices.sort_unstable();
        indices.dedup();
        kept.extend(indices.into_iter().map(|index| together[index]));
    }
    kept
}

fn across(place: Option<f64>) -> u32 {
    (place.unwrap_or(0.0) * SIDE).round() as u32
}

fn down(place: Option<f64>) -> u32 {
    (SIDE - place.unwrap_or(0.0) * SIDE).round() as u32
}

fn percent(place: Option<f64>) -> String {
    format!("{:.2}%", place.unwrap_or(0.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: Vec<Point>) -> Series {
        Series { colour: 0, label: "train".into(), name: "train".into(), dashed: false, points }
    }

    fn chart(series: Vec<Series>) -> String {
        Chart { title: "Loss", base: Base::Free, tall: true, series, mark: None }.html()
    }

    #[test]
    fn a_spike_of_a_long_run_stays() {
        let mut points: Vec<Point> = (1..=30_000).map(|step| (step, 1.0 + (step % 7) as f64 / 100.0)).collect();
        points[17_001].1 = 9.0;
        points[17_003].1 = 0.25;
        points[20_000].1 = f64::NAN;
        let kept = thinned(&points, &Axis::of_steps(1, 30_000, 8));
        assert!(kept.len() <= 3 * BUCKETS, "{}", kept.len());
        assert!(kept.contains(&(17_002, 9.0)) && kept.contains(&(17_004, 0.25)));
        assert_eq!(kept.iter().filter(|(_, value)| value.is_nan()).count(), 1);
        assert!(kept.is_sorted_by_key(|(step, _)| *step));
        let medians = medians(&points, &Axis::of_steps(1, 30_000, 8));
        // The last step has a bucket to itself.
        let (last, others) = medians.split_last().expect("buckets");
        assert!(medians.len() <= BUCKETS && others.iter().all(|(_, value)| *value == 1.03), "{medians:?}");
        assert_eq!(*last, (30_000, 1.05));
        let html = chart(vec![series(points)]);
        assert!(html.contains("class=\"curve range s0\""));
        assert!(html.len() < 30_000 && html.contains("not finite at 1 step<"), "{}", html.len());
    }

    #[test]
    fn a_gap_where_a_value_is_not_finite() {
        let points = vec![(1, 1.0), (2, 2.0), (3, f64::NAN), (4, 1.0)];
        let drawn =
            Drawn::of(&points, &Axis::of_steps(1, 4, 4), &Axis::of_values([1.0, 2.0].into_iter(), Base::Free, 4));
        assert_eq!(drawn.curve, "M0 10000 3333 0M10000 10000");
        assert_eq!(drawn.bad, "M6667 0v350");
    }

    #[test]
    fn nothing_to_draw_is_no_chart() {
        assert_eq!(chart(Vec::new()), "");
        assert_eq!(chart(vec![series(Vec::new())]), "");
        let only_bad = chart(vec![series(vec![(3, f64::INFINITY)])]);
        assert!(only_bad.contains("class=\"bad\"") && only_bad.contains("not finite"), "{only_bad}");
    }

    #[test]
    fn labels_of_equal_curves_do_not_touch() {
        let html = chart((0..3).map(|_| series(vec![(1, 1.0), (2, 1.0)])).collect());
        let tops: Vec<f64> = html
            .split("<b class=\"s0\" style=\"top:")
            .skip(1)
            .filter_map(|rest| rest.split('%').next()?.parse().ok())
            .collect();
        assert_eq!(tops.len(), 3);
        assert!(tops.windows(2).all(|pair| pair[1] - pair[0] >= 6.99) && tops[2] <= 100.0, "{tops:?}");
    }

    #[test]
    fn names_are_escaped() {
        let named = Series { name: "<script>".into(), label: "\"&".into(), ..series(vec![(1, 1.0)]) };
        let html = chart(vec![named]);
        assert!(
            !html.contains("<script>") && html.contains("&lt;script&gt;") && html.contains("&quot;&amp;"),
            "{html}"
        );
    }
}
